"""Reads the weights in a `.keras` file where they are, without a copy.

A `.keras` file is a zip archive. Keras stores the weights in it uncompressed,
so they are a part of the file.
"""

import io
import os
import struct
import zipfile
import zlib

from keras_tp.backend.saving import all_processes

_WEIGHTS = "model.weights.h5"
_BLOCK_BYTES = 2**22
# Zip's local header: a signature, fields that the directory of the archive has
# as well, and the lengths of a name and of extra fields that follow.
_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\3\4"
_IS_ENCRYPTED = 1
# The polynomial of CRC-32, with its lowest power in the highest bit.
_POLYNOMIAL = 0xEDB88320
_ONE, _X_TO_THE_8TH = 1 << 31, 1 << 23


class Part(io.RawIOBase):
    """A part of a file, as a file that is open for reading.

    Attributes:
        path: String. The file.
        start: Int. Where the part begins, in bytes.
        size: Int. The bytes of the part.
    """

    def __init__(self, path, start, size):
        super().__init__()
        self.path, self.start, self.size = path, start, size
        self._file = open(path, "rb", buffering=0)
        self._file.seek(start)

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self._file.tell() - self.start

    def seek(self, offset, whence=os.SEEK_SET):
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell()}
        offset += base.get(whence, self.size)
        return self._file.seek(self.start + max(0, offset)) - self.start

    def readinto(self, buffer):
        left = max(0, self.size - self.tell())
        return self._file.readinto(memoryview(buffer)[:left])

    def close(self):
        if not self.closed:
            self._file.close()
        super().close()


def stored_part(archive, name=_WEIGHTS):
    """Returns a member of an archive as a `Part` of the archive's file.

    Args:
        archive: `zipfile.ZipFile`.
        name: String or path of the member. Defaults to that of the weights.

    Returns:
        A `Part`, or `None` if the member or the archive's file is missing, or
        the member is compressed.
    """
    try:
        member = archive.getinfo(str(name))
    except KeyError:
        return None
    path = archive.filename
    if (
        path is None
        or not os.path.isfile(path)
        or member.compress_type != zipfile.ZIP_STORED
        or member.compress_size != member.file_size
        or member.flag_bits & _IS_ENCRYPTED
    ):
        return None
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        signature, *lengths = _HEADER.unpack(file.read(_HEADER.size))
    start = member.header_offset + _HEADER.size + sum(lengths)
    if signature != _SIGNATURE or start + member.file_size > archive.start_dir:
        raise zipfile.BadZipFile(f"Bad header of the file {str(name)!r}")
    return Part(path, start, member.file_size)


def check(path, share):
    """Compares the weights in a `.keras` file with their CRC-32.

    A collective. Processes that read one file divide its bytes among them.
    Other files, and weights that are compressed, are left to `zipfile`.

    Args:
        path: What `keras.saving.load_model` receives.
        share: Pair: the index of this process, and the number of processes
            that divide the bytes among them.

    Returns:
        Boolean, whether the weights were compared. `stored_part` has them.

    Raises:
        BadZipFile: if the checksum differs.
    """
    index, count = share
    is_in_place = False

    def read():
        nonlocal is_in_place
        own = _crc_of_share(path, index, count)
        is_in_place = own is not None
        if is_in_place and count == 1:
            _compare([own])
        return own

    found = all_processes.run(read, "read a file of weights")
    if is_in_place and count > 1:
        _compare(found)
    return is_in_place


def _compare(shares):
    crc = 0
    for piece, size, _ in shares:
        crc = combined_crc(crc, piece, size)
    if {crc} != {wanted for *_, wanted in shares}:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {_WEIGHTS!r}")


def _crc_of_share(path, index, count):
    """Returns the CRC-32 of a share, its bytes, and the CRC-32 of the whole.

    `None` if the path is that of another file.
    """
    if not str(path).endswith(".keras") or not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        part = stored_part(archive)
        wanted = part and archive.getinfo(_WEIGHTS).CRC
    if part is None:
        return None
    with part:
        start, end = (part.size * i // count for i in (index, index + 1))
        part.seek(start)
        crc, left = 0, end - start
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(1, left))))
        while left:
            read = part.readinto(buffer[:left])
            if not read:
                raise EOFError(f"The file ends before {end} bytes.")
            crc = zlib.crc32(buffer[:read], crc)
            left -= read
    return crc, end - start, wanted


def combined_crc(first, second, size):
    """Returns the CRC-32 of bytes that follow others, from those of both.

    Args:
        first: Int. The CRC-32 of the first bytes.
        second: Int. That of the bytes that follow.
        size: Int. How many bytes follow.

    Returns:
        Int, as `crc32_combine` of zlib: the bytes that follow multiply the
        first CRC-32, a polynomial, by x to the power of their bits.
    """
    power, base = _ONE, _X_TO_THE_8TH
    while size:
        if size & 1:
            power = _product(power, base)
        base = _product(base, base)
        size >>= 1
    return _product(power, first) ^ second


def _product(a, b):
    """Multiplies two polynomials modulo that of CRC-32."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
