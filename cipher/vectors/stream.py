#!/usr/bin/env python3
"""Writes the golden files of stream format version 1. Not part of the build.

usage: stream.py        writes sealed-v1.stream, sealed-v1-unit.stream and sealed-v1-short.stream

An independent implementation of cipher/src/stream.rs, from the format's description alone, on the
Python package `cryptography` (OpenSSL, which has ciphertext stealing). The plaintext is the offset
of each 32-bit word, little-endian, truncated; the key is the bytes 0, 1, 2, ...

sealed-v1.stream        8237 bytes: two whole units, and one of two blocks and 13 bytes
sealed-v1-unit.stream   8197 bytes: a unit, and one with 5 bytes more
sealed-v1-short.stream  files of 1, 2, ..., 15 bytes, one after the other
"""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

UNIT = 4096
KEY = bytes(range(64))


def xts(tweak, data):
    encryptor = Cipher(algorithms.AES(KEY), modes.XTS(tweak)).encryptor()
    return encryptor.update(data) + encryptor.finalize()


def plain(length):
    return b"".join(offset.to_bytes(4, "little") for offset in range(0, length, 4))[:length]


def short(data):
    """Feistel network; the bits are those of the number that the bytes are, little-endian."""
    bits = 4 * len(data)
    number = int.from_bytes(data, "little")
    low, high = number % 2**bits, number >> bits
    for turn in range(10):
        tweak = bytes(8) + bytes([len(data), turn]) + bytes(6)
        mixed = int.from_bytes(xts(tweak, high.to_bytes(16, "little")), "little") % 2**bits
        low, high = high, low ^ mixed
    return (high << bits | low).to_bytes(len(data), "little")


def seal(data):
    if len(data) < 16:
        return short(data)
    # Bytes after the last unit that are fewer than a block belong to that unit.
    starts = [at for at in range(0, len(data), UNIT) if len(data) - at >= 16]
    ends = starts[1:] + [len(data)]
    units = enumerate(zip(starts, ends))
    return b"".join(xts(number.to_bytes(16, "little"), data[start:end]) for number, (start, end) in units)


def write(name, sealed):
    Path(__file__).with_name(name).write_bytes(sealed)


write("sealed-v1.stream", seal(plain(8237)))
write("sealed-v1-unit.stream", seal(plain(8197)))
write("sealed-v1-short.stream", b"".join(seal(plain(length)) for length in range(1, 16)))
