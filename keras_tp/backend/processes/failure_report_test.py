import json

import pytest

from keras_tp.backend.processes import failure_report
from keras_tp.backend.processes.failure_report import Failure


def test_first_error_is_last_and_the_others_are_short(capsys):
    found = [
        Failure(2.0, 0, "Traceback\nlost 1\n", "lost 1\n", 1),
        Failure(1.0, 1, "Traceback\nwrong\n", "wrong\n", 3),
        Failure(3.0, 2, "Traceback\nlost 1\n", "lost 1\n", 1),
        Failure(4.0, 3, "Traceback\nlost 2\n", "lost 2\n", 1),
    ]
    assert failure_report.report(found, 4) == 3
    assert capsys.readouterr().err == (
        "[keras_tp.launch] Then, process 3 of 4:\nlost 2\n"
        "[keras_tp.launch] Then, processes 0, 2 of 4:\nlost 1\n"
        "[keras_tp.launch] First error, process 1 of 4:\nTraceback\nwrong\n"
    )
    assert failure_report.report(found, 4, everything=True) == 3
    said = capsys.readouterr().err
    assert said.count("Traceback\nlost 1\n") == 1
    assert said.count("Traceback\nlost 2\n") == 1
    assert said.endswith("First error, process 1 of 4:\nTraceback\nwrong\n")


def test_a_process_that_was_killed_failed_first(capsys):
    """Its end may be seen after the error of one that waited for it."""
    found = [
        Failure(1.0, 1, "Traceback\nlost\n", "lost\n", 1),
        failure_report.untold(1.5, 0, -9),
    ]
    assert failure_report.report(found, 2) == 137
    assert "First error, process 0 of 2:\n" in capsys.readouterr().err


def test_one_error_of_all_processes_is_shown_once(capsys):
    found = [
        Failure(2.0, 0, "Traceback 0\nwrong\n", "wrong\n", 1),
        Failure(1.0, 1, "Traceback 1\nwrong\n", "wrong\n", 1),
    ]
    failure_report.report(found, 2)
    assert capsys.readouterr().err == (
        "[keras_tp.launch] First error, processes 0, 1 of 2:\n"
        "Traceback 1\nwrong\n"
    )


def test_nothing_failed(capsys):
    assert failure_report.report([], 2) == 0
    assert capsys.readouterr().err == ""


def test_what_a_process_told(tmp_path):
    path = tmp_path / "error"
    assert failure_report.told(str(path), 1, 1) is None
    entries = [
        {"at": 5.0, "text": "Traceback\nwrong\n", "summary": "wrong\n"},
        {"at": 6.0, "text": "and ends\n", "summary": "and ends\n"},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = "Traceback\nwrong\nand ends\n"
    expected = Failure(5.0, 1, text, "wrong\n", 7)
    assert failure_report.told(str(path), 1, 7) == expected
    # The launcher ended it while it reported.
    assert failure_report.told(str(path), 1, 143).code == 1


@pytest.mark.parametrize(
    "return_code, how, code",
    [(7, "exit code 7", 7), (-9, "ended by SIGKILL", 137)],
)
def test_what_a_process_did_not_tell(return_code, how, code, tmp_path):
    output = tmp_path / "out"
    output.write_text("".join(f"line {n}\n" for n in range(100)))
    found = failure_report.untold(1.0, 0, return_code, str(output))
    assert how in found.summary
    assert found.code == code
    assert "line 79" not in found.text
    assert found.text.endswith("line 98\nline 99\n")
    assert failure_report.untold(1.0, 0, return_code).text == found.summary
