#!/usr/bin/env python3
"""Writes the golden files in this folder: the providers' formats, version 1, by an independent
implementation.

Needs the package "cryptography". Released files never change; a new format gets new files.
"""
import base64
import json
import pathlib
import struct

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import aes_key_wrap, aes_key_wrap_with_padding

HERE = pathlib.Path(__file__).parent


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def text(data):
    return base64.b64encode(data).decode()


def wrap(secret, version, name, context, plaintext, nonce):
    bound = b"pagevault file provider 1"
    for part in (name.encode(), struct.pack(">Q", version), context.encode()):
        bound += struct.pack(">Q", len(part)) + part
    return b"\x01" + struct.pack(">Q", version) + nonce + AESGCM(secret).encrypt(nonce, plaintext, bound)


assert crc32c(b"123456789") == 0xE3069283

secrets = {1: bytes(range(32)), 2: bytes(range(32, 64))}
created = {1: 1767225600, 2: 1798761600}
keys = {"main": {"versions": [{"version": v, "created": created[v], "key": text(secrets[v])} for v in secrets]}}
crc = crc32c(json.dumps(keys, separators=(",", ":")).encode())
key_file = {"pagevault_key_file": 1, "keys": keys, "crc32c": f"{crc:08x}"}
(HERE / "key_file_1.json").write_text(json.dumps(key_file, indent=2) + "\n")

wrapped = [
    {
        "key": "main",
        "context": context,
        "key_version": version,
        "plaintext": text(plaintext),
        "wrapped": text(wrap(secrets[version], version, "main", context, plaintext, bytes([version] * 12))),
    }
    for version in secrets
    for context, plaintext in (("pagevault/1/0", b"\xa5" * 32), ("b\u00e9", b""))
]
(HERE / "file_wrapped_1.json").write_text(json.dumps(wrapped, indent=2, ensure_ascii=False) + "\n")


def wrap_by_command(once, returned, version, name, context, plaintext, nonce):
    head = b"\x01" + struct.pack(">QH", version, len(returned)) + returned
    bound = b"pagevault command provider 1"
    for part in (head, name.encode(), context.encode()):
        bound += struct.pack(">Q", len(part)) + part
    return head + nonce + AESGCM(once).encrypt(nonce, plaintext, bound)


# The program for these files returns a key in base64.
once = bytes(range(32, 64))
wrapped = [
    {
        "key": name,
        "context": "pagevault/1/0",
        "key_version": version,
        "plaintext": text(plaintext),
        "wrapped": text(
            wrap_by_command(once, text(once).encode(), version, name, "pagevault/1/0", plaintext, bytes([version % 251] * 12))
        ),
    }
    for name, version, plaintext in (("main", 1, b"\xa5" * 32), ("b\u00e9 1", 2**40, b""))
]
(HERE / "command_wrapped_1.json").write_text(json.dumps(wrapped, indent=2, ensure_ascii=False) + "\n")

key = "key/1234abcd-12ab-34cd-56ef-1234567890ab"
arns = [f"arn:aws:kms:eu-central-1:111122223333:{key}", f"arn:aws-cn:kms:cn-north-1:1:{key[:4]}mrk-{key[4:]}"]
aws = [
    {
        "arn": arn,
        "key_version": version,
        "ciphertext": text(ciphertext),
        "wrapped": text(b"\x01" + struct.pack(">H", len(arn)) + arn.encode() + struct.pack(">Q", version) + ciphertext),
    }
    for arn, version, ciphertext in zip(arns, (20260105080000, 1), (bytes(range(184)), b"\xff"))
]
(HERE / "aws_kms_wrapped_1.json").write_text(json.dumps(aws, indent=2) + "\n")

ring = "projects/example.com:db/locations/europe-west3/keyRings/db"
gcp = [
    {
        "key": name,
        "key_version": version,
        "ciphertext": text(ciphertext),
        "wrapped": text(b"\x01" + struct.pack(">H", len(name)) + name.encode() + struct.pack(">Q", version) + ciphertext),
    }
    for name, version, ciphertext in (
        (f"{ring}/cryptoKeys/db-kek", 1, bytes(range(113))),
        ("projects/p/locations/global/keyRings/r_1/cryptoKeys/K", 2**33, b"\xff"),
    )
]
(HERE / "gcp_kms_wrapped_1.json").write_text(json.dumps(gcp, indent=2) + "\n")


def wrap_by_token(kek, version, method, identifier, name, context, plaintext, nonce, once):
    head = b"\x01" + struct.pack(">QBB", version, method, len(identifier)) + identifier
    secret = kek
    if method != 1:
        wrap_once = {2: aes_key_wrap, 3: aes_key_wrap_with_padding}[method]
        wrapped = wrap_once(kek, once)
        head += struct.pack(">H", len(wrapped)) + wrapped
        secret = once
    bound = b"pagevault pkcs11 provider 1"
    for part in (head, name.encode(), context.encode()):
        bound += struct.pack(">Q", len(part)) + part
    return head + nonce + AESGCM(secret).encrypt(nonce, plaintext, bound)


def wrap_by_azure(version, method, identifier, once, wrapped, name, context, plaintext, nonce):
    head = b"\x01" + struct.pack(">QBB", version, method, len(identifier)) + identifier
    head += struct.pack(">H", len(wrapped)) + wrapped
    bound = b"pagevault azure_key_vault provider 1"
    for part in (head, name.lower().encode(), context.encode()):
        bound += struct.pack(">Q", len(part)) + part
    return head + nonce + AESGCM(once).encrypt(nonce, plaintext, bound)


kek = bytes(range(64, 96))
# What RSA wraps is random; the provider does not look at it.
azure = [
    {
        "key": name,
        "version": identifier,
        "method": method,
        "context": "pagevault/1/0",
        "key_version": version,
        "once": text(once),
        "wrapped_once": text(wrapped),
        "plaintext": text(plaintext),
        "wrapped": text(
            wrap_by_azure(
                version, method, identifier.encode(), once, wrapped, name, "pagevault/1/0", plaintext, bytes([method] * 12)
            )
        ),
    }
    for method, version, identifier, name, wrapped, plaintext in (
        (2, 20260105080000, "0123456789abcdef0123456789abcdef", "db-kek", aes_key_wrap(kek, once), b"\xa5" * 32),
        (4, 20271231235959, "f" * 32, "DB-Kek", bytes(range(256)), b""),
    )
]
(HERE / "azure_key_vault_wrapped_1.json").write_text(json.dumps(azure, indent=2) + "\n")

tokens = [
    {
        "kek": kek.hex(),
        "id": identifier.hex(),
        "method": method,
        "key": name,
        "context": "pagevault/1/0",
        "key_version": version,
        "plaintext": text(plaintext),
        "wrapped": text(
            wrap_by_token(kek, version, method, identifier, name, "pagevault/1/0", plaintext, bytes([method] * 12), once)
        ),
    }
    for method, version, identifier, name, plaintext in (
        (1, 1, b"\x01", "main", b"\xa5" * 32),
        (1, 7, struct.pack(">Q", 7) + b"\x5a" * 8, "b\u00e9 1", b""),
        (2, 1, b"", "main", b"\xa5" * 32),
        (3, 258, b"\x01\x02", "main", b"\xa5" * 33),
    )
]
(HERE / "pkcs11_wrapped_1.json").write_text(json.dumps(tokens, indent=2, ensure_ascii=False) + "\n")


def bind(head, name, context):
    bound = b"pagevault kmip provider 1"
    for part in (head, name.encode(), context.encode()):
        bound += struct.pack(">Q", len(part)) + part
    return bound


def wrap_by_server(kek, version, method, identifier, name, context, plaintext, nonce, iv, once):
    head = b"\x01" + struct.pack(">QBB", version, method, len(identifier)) + identifier
    if method == 1:
        wrapped = AESGCM(kek).encrypt(iv, once, bind(head, name, context))
    else:
        cipher = Cipher(algorithms.AES(kek), modes.CBC(iv)).encryptor()
        wrapped = cipher.update(once) + cipher.finalize()
    head += struct.pack(">B", len(iv)) + iv + struct.pack(">H", len(wrapped)) + wrapped
    purpose = b"pagevault kmip provider 1"
    info = struct.pack("<Q", len(purpose)) + purpose + struct.pack("<Q", 0)
    secret = HKDF(hashes.SHA256(), 32, None, info).derive(once)
    return head + nonce + AESGCM(secret).encrypt(nonce, plaintext, bind(head, name, context))


servers = [
    {
        "kek": kek.hex(),
        "id": "1",
        "method": method,
        "key": name,
        "context": "pagevault/1/0",
        "key_version": version,
        "plaintext": text(plaintext),
        "wrapped": text(
            wrap_by_server(kek, version, method, b"1", name, "pagevault/1/0", plaintext, bytes([method] * 12), iv, once)
        ),
    }
    for method, version, name, plaintext, iv in (
        (1, 20261127070809, "main", b"\xa5" * 32, b"\x5a" * 12),
        (1, 20261127070809, "b\u00e9 1", b"", b"\x5b" * 16),
        (2, 99991231235959, "id:1", b"\xa5" * 33, b"\x5c" * 16),
    )
]
(HERE / "kmip_wrapped_1.json").write_text(json.dumps(servers, indent=2, ensure_ascii=False) + "\n")
