"""A KMIP server for tests, PyKMIP, and its administrator.

    pykmip_server.py serve DIRECTORY       reads server.conf there
    pykmip_server.py do DIRECTORY PORT     performs the calls on standard input, a JSON array; prints results

PyKMIP has neither Re-key nor links nor the attribute Extractable, and CBC only with padding. The
file "behaviour.json" in the directory, which is read for each request, adds them, and faults;
without it, the server is PyKMIP as it is:

    {"re_key": true, "links": true, "extractable": true,    what the server has
     "pre_active": true,          keys from Re-key are not active
     "without": ["Encrypt"],      operations that it does not have
     "no_gcm": true,              AES-GCM is refused
     "own_iv": true,              the client may not choose an initialization vector
     "refuse": {"Encrypt": [58, 2]},      an operation is refused for a reason, a number of times
     "denied": ["2"],             attributes of these keys are refused
     "other_key": true,           answers are about another key
     "reply": "garbage"}          replies are not KMIP: garbage, huge, drip, close
"""

import json
import os
import sys
import time
from types import SimpleNamespace

from kmip.core import enums, exceptions, objects as core_objects, primitives, utils
from kmip.core.factories import attribute_values
from kmip.core.factories.payloads.request import RequestPayloadFactory
from kmip.core.messages import payloads
from kmip.pie import objects
from kmip.services.server import engine, policy, server, session
from kmip.services.server.crypto import engine as crypto

Operation, Tags = enums.Operation, enums.Tags
directory = sys.argv[2]


def path(name):
    return os.path.join(directory, name)


def stored(name):
    try:
        with open(path(name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def store(name, value):
    with open(path(name + ".new"), "w") as file:
        json.dump(value, file)
    os.rename(path(name + ".new"), path(name))


def named(operation):
    """An operation's name in behaviour.json."""
    return "".join(part.capitalize() for part in operation.name.split("_"))


class Link(primitives.Struct):
    """The attribute Link, which PyKMIP does not have."""

    def __init__(self, other=None):
        super().__init__(tag=Tags.LINK)
        self.kind = primitives.Enumeration(enums.LinkType, enums.LinkType.REPLACEMENT_OBJECT_LINK, Tags.LINK_TYPE)
        self.other = primitives.TextString(other, Tags.LINKED_OBJECT_IDENTIFIER)

    def read(self, stream, kmip_version=None):
        super().read(stream, kmip_version=kmip_version)
        inner = utils.BytearrayStream(stream.read(self.length))
        self.kind.read(inner, kmip_version=kmip_version)
        self.other.read(inner, kmip_version=kmip_version)

    def write(self, stream, kmip_version=None):
        inner = utils.BytearrayStream()
        self.kind.write(inner, kmip_version=kmip_version)
        self.other.write(inner, kmip_version=kmip_version)
        self.length = inner.length()
        super().write(stream, kmip_version=kmip_version)
        stream.write(inner.buffer)


class Values(attribute_values.AttributeValueFactory):
    def create_attribute_value(self, name, value):
        if name is enums.AttributeType.LINK:
            return Link(value)
        return super().create_attribute_value(name, value)

    def create_attribute_value_by_enum(self, tag, value):
        if tag is Tags.LINK:
            return Link(value)
        if tag is Tags.EXTRACTABLE:
            return primitives.Boolean(value, tag)
        return super().create_attribute_value_by_enum(tag, value)


class Policy(policy.AttributePolicy):
    def __init__(self, version):
        super().__init__(version)
        self._attribute_rule_sets["Extractable"] = self._attribute_rule_sets["Sensitive"]


class Engine(engine.KmipEngine):
    def _process_operation(self, operation, payload):
        self.behaviour = behaviour = stored("behaviour.json")
        name = named(operation)
        with open(path("operations"), "a") as file:
            print(name, file=file)
        refuse = behaviour.get("refuse", {})
        if name in refuse and refuse[name][1] > 0:
            refuse[name][1] -= 1
            store("behaviour.json", behaviour)
            raise exceptions.KmipError(reason=enums.ResultReason(refuse[name][0]), message="said by the server")
        if name in behaviour.get("without", []):
            raise exceptions.OperationNotSupported(name + " is not supported")
        if operation == Operation.GET_ATTRIBUTES and payload.unique_identifier in behaviour.get("denied", []):
            raise exceptions.PermissionDenied("denied")
        if operation == Operation.REKEY and behaviour.get("re_key"):
            return self.re_key(payload)
        if operation == Operation.ADD_ATTRIBUTE and behaviour.get("links"):
            return self.add_link(payload)
        answer = super()._process_operation(operation, payload)
        if behaviour.get("other_key") and hasattr(answer, "unique_identifier"):
            answer.unique_identifier = "999"
        return answer

    def more(self, uid):
        """What PyKMIP does not store about a key."""
        return stored("more.json").get(str(uid), {})

    def remember(self, uid, **values):
        more = stored("more.json")
        more.setdefault(str(uid), {}).update(values)
        store("more.json", more)

    def re_key(self, payload):
        old = self._get_object_with_access_controls(payload.unique_identifier, Operation.REKEY)
        value = self._cryptography_engine.create_symmetric_key(old.cryptographic_algorithm, old.cryptographic_length)
        new = objects.SymmetricKey(old.cryptographic_algorithm, old.cryptographic_length, value["value"], list(old.cryptographic_usage_masks))
        # The name moves to the new key (KMIP 1.4 section 4.4).
        new.names = list(old.names)
        old.names = []
        new.operation_policy_name = old.operation_policy_name
        new.sensitive = old.sensitive
        new._owner = self._client_identity[0]
        new.initial_date = int(time.time())
        if not self.behaviour.get("pre_active"):
            new.state = enums.State.ACTIVE
        self._data_session.add(new)
        self._data_session.commit()
        uid = str(new.unique_identifier)
        self.remember(uid, extractable=self.more(payload.unique_identifier).get("extractable", True))
        links = self.more(payload.unique_identifier).get("links", [])
        self.remember(payload.unique_identifier, links=links + [uid])
        return payloads.RekeyResponsePayload(unique_identifier=uid)

    def add_link(self, payload):
        uid = payload.unique_identifier
        self._get_object_with_access_controls(uid, Operation.ADD_ATTRIBUTE)
        new = payload.new_attribute.attribute if payload.new_attribute else payload.attribute.attribute_value
        self.remember(uid, links=self.more(uid).get("links", []) + [new.other.value])
        return payloads.ModifyAttributeResponsePayload(unique_identifier=uid, attribute=payload.attribute)

    def _process_query(self, payload):
        answer = super()._process_query(payload)
        if enums.QueryFunction.QUERY_OPERATIONS in payload.query_functions:
            all = answer.operations
            all += [Operation.REKEY] if self.behaviour.get("re_key") else []
            all += [Operation.ADD_ATTRIBUTE] if self.behaviour.get("links") else []
            without = self.behaviour.get("without", [])
            answer.operations = [one for one in all if named(one) not in without]
        return answer

    def _process_create(self, payload):
        attributes = payload.template_attribute.attributes
        told = [one for one in attributes if one.attribute_name.value == "Extractable"]
        if told and self.behaviour.get("extractable"):
            attributes.remove(told[0])
        answer = super()._process_create(payload)
        self.remember(answer.unique_identifier, extractable=told[0].attribute_value.value if told else True)
        return answer

    def _process_get(self, payload):
        if self.behaviour.get("extractable") and self.more(payload.unique_identifier).get("extractable") is False:
            raise exceptions.KmipError(reason=enums.ResultReason.NOT_EXTRACTABLE, message="not extractable")
        return super()._process_get(payload)

    def _get_attributes_from_managed_object(self, managed_object, names):
        told = super()._get_attributes_from_managed_object(managed_object, names)
        factory = attribute_values.AttributeValueFactory()
        more = self.more(managed_object.unique_identifier)

        def tell(kind, value):
            value = factory.create_attribute_value(kind, value)
            value.tag = Tags.ATTRIBUTE_VALUE
            told.append(core_objects.Attribute(core_objects.Attribute.AttributeName(kind.value), None, value))

        told = [one for one in told if one.attribute_name.value not in ("Extractable", "Link")]
        if self.behaviour.get("extractable"):
            tell(enums.AttributeType.EXTRACTABLE, more.get("extractable", True))
        if self.behaviour.get("re_key") or self.behaviour.get("links"):
            for other in more.get("links", []):
                tell(enums.AttributeType.LINK, other)
        return told


class Cryptography(crypto.CryptographyEngine):
    def encrypt(self, algorithm, key, text, cipher_mode=None, padding_method=None, iv_nonce=None, **more):
        behaviour = stored("behaviour.json")
        if behaviour.get("no_gcm") and cipher_mode == enums.BlockCipherMode.GCM:
            raise exceptions.InvalidField("GCM is not supported")
        if behaviour.get("own_iv") and iv_nonce is not None:
            raise exceptions.InvalidField("the server chooses the initialization vector")
        return super().encrypt(algorithm, key, text, cipher_mode, padding_method, iv_nonce, **more)

    def _handle_symmetric_padding(self, algorithm, text, padding_method, undo_padding=False):
        if stored("behaviour.json") and padding_method == enums.PaddingMethod.NONE:
            return text
        return super()._handle_symmetric_padding(algorithm, text, padding_method, undo_padding)


class Session(session.KmipSession):
    def _send_response(self, data):
        reply = stored("behaviour.json").get("reply")
        if reply == "garbage":
            self._connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\nhunter2 " * 8)
        elif reply == "truncated":
            # Well-formed lengths, and a message that is cut in the middle.
            cut = bytes(data)[: len(data) // 2 // 8 * 8]
            self._connection.sendall(cut[:4] + (len(cut) - 8).to_bytes(4, "big") + cut[8:])
        elif reply == "huge":
            self._connection.sendall(bytes(data)[:4] + b"\x7f\xff\xff\xf8" + bytes(data)[8:])
            time.sleep(60)
        elif reply == "drip":
            self._connection.sendall(bytes(data)[:8])
            for byte in bytes(data)[8:-1]:
                time.sleep(0.1)
                self._connection.sendall(bytes([byte]))
        elif reply == "close":
            raise exceptions.ConnectionClosed()
        else:
            super()._send_response(data)


def serve():
    RequestPayloadFactory._create_add_attribute_payload = lambda self: payloads.ModifyAttributeRequestPayload()
    for module in (attribute_values, core_objects):
        module.AttributeValueFactory = Values
    from kmip.core.factories import attributes
    attributes.AttributeValueFactory = Values
    # Not in the classes' own modules, where they look themselves up by name.
    server.session = SimpleNamespace(KmipSession=Session)
    server.engine = SimpleNamespace(KmipEngine=Engine)
    engine.engine = SimpleNamespace(CryptographyEngine=Cryptography)
    engine.policy = SimpleNamespace(AttributePolicy=Policy)
    started = server.KmipServer(config_path=path("server.conf"), log_path=path("server.log"))
    with started:
        started.serve()


def perform(client, name, *arguments):
    if name == "make":
        return make(client, *arguments)
    if name == "register":
        key, value = arguments
        masks = [enums.CryptographicUsageMask.ENCRYPT, enums.CryptographicUsageMask.DECRYPT]
        value = bytes.fromhex(value)
        uid = client.register(objects.SymmetricKey(enums.CryptographicAlgorithm.AES, 8 * len(value), value, masks, key))
        client.activate(uid)
        return uid
    if name == "revoke":
        uid, reason = arguments
        return client.revoke(enums.RevocationReasonCode[reason], uid)
    if name == "get":
        return client.get(arguments[0]).value.hex()
    return getattr(client, name)(*arguments)


def make(client, key, extractable=None, active=True, bits=256, masks=("ENCRYPT", "DECRYPT"), algorithm="AES"):
    create = client.attribute_factory.create_attribute
    kinds = enums.AttributeType
    given = [
        create(kinds.CRYPTOGRAPHIC_ALGORITHM, enums.CryptographicAlgorithm[algorithm]),
        create(kinds.CRYPTOGRAPHIC_LENGTH, bits),
        create(kinds.CRYPTOGRAPHIC_USAGE_MASK, [enums.CryptographicUsageMask[mask] for mask in masks]),
        create(kinds.NAME, key),
    ]
    if extractable is not None:
        given.append(create(kinds.EXTRACTABLE, extractable))
    template = core_objects.TemplateAttribute(attributes=given)
    made = client.proxy.create(enums.ObjectType.SYMMETRIC_KEY, template)
    if made.result_status.value != enums.ResultStatus.SUCCESS:
        raise RuntimeError(made.result_message.value)
    uid = made.uuid
    if active:
        client.activate(uid)
    return uid


def administer(port):
    from kmip.pie.client import ProxyKmipClient
    client = ProxyKmipClient(
        hostname="127.0.0.1",
        port=port,
        cert=path("client.pem"),
        key=path("client.key"),
        ca=path("ca.pem"),
        ssl_version="PROTOCOL_TLSv1_2",
        config="client",
        config_file=path("client.conf"),
        kmip_version=enums.KMIPVersion.KMIP_1_4,
    )
    with client:
        print(json.dumps([perform(client, *call) for call in json.load(sys.stdin)]))


if sys.argv[1] == "serve":
    serve()
else:
    administer(int(sys.argv[3]))
