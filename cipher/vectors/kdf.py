#!/usr/bin/env python3
"""Prints the derived keys that tests in cipher/src/kdf.rs and interim.rs expect. Not part of the build."""

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF



def derive(key, label, context):
    info = b"".join(len(part).to_bytes(8, "little") + part for part in (label, context))
    return HKDF(hashes.SHA256(), 64, None, info).derive(key).hex()


print(derive(b"\x0b" * 32, b"temporary file", b"base/pgsql_tmp/pgsql_tmp1.0"))
for relation, version, cipher in (16384, 1, 1), (0xFFFFFFFF, 7167, 2):
    file = b"".join(number.to_bytes(4, "little") for number in (5, relation))
    context = file + version.to_bytes(2, "little") + bytes([cipher])
    print(derive(bytes(range(64)), b"pagevault interim page v1", context))
