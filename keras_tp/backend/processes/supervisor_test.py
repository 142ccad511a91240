import secrets
import socket

from keras_tp.backend.processes import supervisor


def test_ports_are_below_those_of_outgoing_connections():
    ports = supervisor.free_ports(20)
    assert len(set(ports)) == 20
    # Linux gives out 32768 and above, other systems 49152 and above.
    assert all(1024 < port < 32768 for port in ports)


def test_a_port_in_use_is_not_given(monkeypatch):
    taken, free = supervisor.free_ports(2)
    first = supervisor.PORTS.start
    # A port of the run that was given already, and one in use, come again.
    draws = iter([taken, free, free, free + 1])
    monkeypatch.setattr(secrets, "randbelow", lambda n: next(draws) - first)
    with socket.create_server(("", taken)):
        found = supervisor.free_ports(1)
    assert found == [free]
