#!/usr/bin/env python3
"""Prints the wrapped key that the test in cipher/src/wrap.rs unwraps. Not part of the build."""

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

nonce = bytes(range(100, 112))
print((nonce + AESGCM(bytes(range(32))).encrypt(nonce, bytes(range(32, 64)), b"context")).hex())
