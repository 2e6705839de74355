//! Numbers of the standard: tags, operations, and values of enumerations (KMIP 1.4 section 9.1.3,
//! KMIP 2.1 section 11).

use super::ttlv::Tag;

/// Tags of fields.
pub(super) mod tag {
    use super::Tag;

    pub(in super::super) const ACTIVATION_DATE: Tag = Tag(0x42_0001);
    pub(in super::super) const ATTRIBUTE: Tag = Tag(0x42_0008);
    pub(in super::super) const ATTRIBUTE_NAME: Tag = Tag(0x42_000A);
    pub(in super::super) const ATTRIBUTE_VALUE: Tag = Tag(0x42_000B);
    pub(in super::super) const AUTHENTICATION: Tag = Tag(0x42_000C);
    pub(in super::super) const BATCH_COUNT: Tag = Tag(0x42_000D);
    pub(in super::super) const BATCH_ITEM: Tag = Tag(0x42_000F);
    pub(in super::super) const BLOCK_CIPHER_MODE: Tag = Tag(0x42_0011);
    pub(in super::super) const CREDENTIAL: Tag = Tag(0x42_0023);
    pub(in super::super) const CREDENTIAL_TYPE: Tag = Tag(0x42_0024);
    pub(in super::super) const CREDENTIAL_VALUE: Tag = Tag(0x42_0025);
    pub(in super::super) const CRYPTOGRAPHIC_ALGORITHM: Tag = Tag(0x42_0028);
    pub(in super::super) const CRYPTOGRAPHIC_LENGTH: Tag = Tag(0x42_002A);
    pub(in super::super) const CRYPTOGRAPHIC_PARAMETERS: Tag = Tag(0x42_002B);
    pub(in super::super) const CRYPTOGRAPHIC_USAGE_MASK: Tag = Tag(0x42_002C);
    pub(in super::super) const INITIAL_DATE: Tag = Tag(0x42_0039);
    pub(in super::super) const IV: Tag = Tag(0x42_003D);
    pub(in super::super) const LINK: Tag = Tag(0x42_004A);
    pub(in super::super) const LINK_TYPE: Tag = Tag(0x42_004B);
    pub(in super::super) const LINKED_OBJECT_IDENTIFIER: Tag = Tag(0x42_004C);
    pub(in super::super) const MAXIMUM_ITEMS: Tag = Tag(0x42_004F);
    pub(in super::super) const MAXIMUM_RESPONSE_SIZE: Tag = Tag(0x42_0050);
    pub(in super::super) const NAME: Tag = Tag(0x42_0053);
    pub(in super::super) const NAME_TYPE: Tag = Tag(0x42_0054);
    pub(in super::super) const NAME_VALUE: Tag = Tag(0x42_0055);
    pub(in super::super) const OBJECT_TYPE: Tag = Tag(0x42_0057);
    pub(in super::super) const OPERATION: Tag = Tag(0x42_005C);
    pub(in super::super) const PADDING_METHOD: Tag = Tag(0x42_005F);
    pub(in super::super) const PROTOCOL_VERSION: Tag = Tag(0x42_0069);
    pub(in super::super) const PROTOCOL_VERSION_MAJOR: Tag = Tag(0x42_006A);
    pub(in super::super) const PROTOCOL_VERSION_MINOR: Tag = Tag(0x42_006B);
    pub(in super::super) const QUERY_FUNCTION: Tag = Tag(0x42_0074);
    pub(in super::super) const REQUEST_HEADER: Tag = Tag(0x42_0077);
    pub(in super::super) const REQUEST_MESSAGE: Tag = Tag(0x42_0078);
    pub(in super::super) const REQUEST_PAYLOAD: Tag = Tag(0x42_0079);
    pub(in super::super) const RESPONSE_HEADER: Tag = Tag(0x42_007A);
    pub(in super::super) const RESPONSE_MESSAGE: Tag = Tag(0x42_007B);
    pub(in super::super) const RESPONSE_PAYLOAD: Tag = Tag(0x42_007C);
    pub(in super::super) const RESULT_MESSAGE: Tag = Tag(0x42_007D);
    pub(in super::super) const RESULT_REASON: Tag = Tag(0x42_007E);
    pub(in super::super) const RESULT_STATUS: Tag = Tag(0x42_007F);
    pub(in super::super) const STATE: Tag = Tag(0x42_008D);
    pub(in super::super) const TEMPLATE_ATTRIBUTE: Tag = Tag(0x42_0091);
    pub(in super::super) const TIME_STAMP: Tag = Tag(0x42_0092);
    pub(in super::super) const UNIQUE_IDENTIFIER: Tag = Tag(0x42_0094);
    pub(in super::super) const USERNAME: Tag = Tag(0x42_0099);
    pub(in super::super) const VENDOR_IDENTIFICATION: Tag = Tag(0x42_009D);
    pub(in super::super) const PASSWORD: Tag = Tag(0x42_00A1);
    pub(in super::super) const DATA: Tag = Tag(0x42_00C2);
    pub(in super::super) const RANDOM_IV: Tag = Tag(0x42_00C5);
    pub(in super::super) const TAG_LENGTH: Tag = Tag(0x42_00CE);
    pub(in super::super) const ADDITIONAL_DATA: Tag = Tag(0x42_00FE);
    pub(in super::super) const AUTHENTICATION_TAG: Tag = Tag(0x42_00FF);
    pub(in super::super) const SENSITIVE: Tag = Tag(0x42_0120);
    pub(in super::super) const EXTRACTABLE: Tag = Tag(0x42_0122);
    pub(in super::super) const NEVER_EXTRACTABLE: Tag = Tag(0x42_0123);
    pub(in super::super) const ATTRIBUTES: Tag = Tag(0x42_0125);
    pub(in super::super) const NEW_ATTRIBUTE: Tag = Tag(0x42_013D);
}

/// Operations that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Operation {
    Create = 0x01,
    ReKey = 0x04,
    Locate = 0x08,
    GetAttributes = 0x0B,
    AddAttribute = 0x0D,
    Activate = 0x12,
    Query = 0x18,
    DiscoverVersions = 0x1E,
    Encrypt = 0x1F,
    Decrypt = 0x20,
}

impl Operation {
    /// The name in the standard.
    pub(super) fn name(self) -> &'static str {
        match self {
            Operation::Create => "Create",
            Operation::ReKey => "Re-key",
            Operation::Locate => "Locate",
            Operation::GetAttributes => "Get Attributes",
            Operation::AddAttribute => "Add Attribute",
            Operation::Activate => "Activate",
            Operation::Query => "Query",
            Operation::DiscoverVersions => "Discover Versions",
            Operation::Encrypt => "Encrypt",
            Operation::Decrypt => "Decrypt",
        }
    }
}

/// Object Type: Symmetric Key.
pub(super) const SYMMETRIC_KEY: u32 = 2;

/// Cryptographic Algorithm: AES.
pub(super) const AES: u32 = 3;

/// Cryptographic Usage Mask: Encrypt and Decrypt.
pub(super) const MAY_ENCRYPT: i32 = 4;
pub(super) const MAY_DECRYPT: i32 = 8;

/// Block Cipher Mode.
pub(super) const CBC: u32 = 1;
pub(super) const GCM: u32 = 9;

/// Padding Method: None.
pub(super) const UNPADDED: u32 = 1;

/// Name Type: Uninterpreted Text String.
pub(super) const PLAIN_NAME: u32 = 1;

/// Link Type: Replacement Object Link.
pub(super) const REPLACEMENT: u32 = 0x106;

/// Credential Type: Username and Password.
pub(super) const BY_PASSWORD: u32 = 1;

/// Query Function: Query Operations, Query Server Information.
pub(super) const QUERY_OPERATIONS: u32 = 1;
pub(super) const QUERY_SERVER: u32 = 3;

/// Result Status: Success.
pub(super) const SUCCESS: u32 = 0;

/// Result Reasons that have a meaning here, with their names.
pub(super) mod reason {
    pub(in super::super) const ITEM_NOT_FOUND: u32 = 0x01;
    pub(in super::super) const AUTHENTICATION_NOT_SUCCESSFUL: u32 = 0x03;
    pub(in super::super) const INVALID_MESSAGE: u32 = 0x04;
    pub(in super::super) const OPERATION_NOT_SUPPORTED: u32 = 0x05;
    pub(in super::super) const MISSING_DATA: u32 = 0x06;
    pub(in super::super) const INVALID_FIELD: u32 = 0x07;
    pub(in super::super) const FEATURE_NOT_SUPPORTED: u32 = 0x08;
    pub(in super::super) const CRYPTOGRAPHIC_FAILURE: u32 = 0x0A;
    pub(in super::super) const ILLEGAL_OPERATION: u32 = 0x0B;
    pub(in super::super) const PERMISSION_DENIED: u32 = 0x0C;
    pub(in super::super) const OBJECT_ARCHIVED: u32 = 0x0D;
    pub(in super::super) const GENERAL_FAILURE: u32 = 0x100;
    pub(in super::super) const USAGE_LIMIT_EXCEEDED: u32 = 0x1A;
    pub(in super::super) const BAD_CRYPTOGRAPHIC_PARAMETERS: u32 = 0x24;
    pub(in super::super) const BAD_PASSWORD: u32 = 0x25;
    pub(in super::super) const INCOMPATIBLE_USAGE_MASK: u32 = 0x29;
    pub(in super::super) const INTERNAL_SERVER_ERROR: u32 = 0x2A;
    pub(in super::super) const OBJECT_DESTROYED: u32 = 0x36;
    pub(in super::super) const OBJECT_NOT_FOUND: u32 = 0x37;
    pub(in super::super) const NOT_AUTHORISED: u32 = 0x39;
    pub(in super::super) const SERVER_LIMIT_EXCEEDED: u32 = 0x3A;
    pub(in super::super) const UNSUPPORTED_PARAMETERS: u32 = 0x3E;
    pub(in super::super) const UNSUPPORTED_VERSION: u32 = 0x3F;
    pub(in super::super) const WRONG_STATE: u32 = 0x43;

    const NAMES: &[(u32, &str)] = &[
        (ITEM_NOT_FOUND, "Item Not Found"),
        (AUTHENTICATION_NOT_SUCCESSFUL, "Authentication Not Successful"),
        (INVALID_MESSAGE, "Invalid Message"),
        (OPERATION_NOT_SUPPORTED, "Operation Not Supported"),
        (MISSING_DATA, "Missing Data"),
        (INVALID_FIELD, "Invalid Field"),
        (FEATURE_NOT_SUPPORTED, "Feature Not Supported"),
        (CRYPTOGRAPHIC_FAILURE, "Cryptographic Failure"),
        (ILLEGAL_OPERATION, "Illegal Operation"),
        (PERMISSION_DENIED, "Permission Denied"),
        (OBJECT_ARCHIVED, "Object Archived"),
        (GENERAL_FAILURE, "General Failure"),
        (USAGE_LIMIT_EXCEEDED, "Usage Limit Exceeded"),
        (BAD_CRYPTOGRAPHIC_PARAMETERS, "Bad Cryptographic Parameters"),
        (BAD_PASSWORD, "Bad Password"),
        (INCOMPATIBLE_USAGE_MASK, "Incompatible Cryptographic Usage Mask"),
        (INTERNAL_SERVER_ERROR, "Internal Server Error"),
        (OBJECT_DESTROYED, "Object Destroyed"),
        (OBJECT_NOT_FOUND, "Object Not Found"),
        (NOT_AUTHORISED, "Not Authorised"),
        (SERVER_LIMIT_EXCEEDED, "Server Limit Exceeded"),
        (UNSUPPORTED_PARAMETERS, "Unsupported Cryptographic Parameters"),
        (UNSUPPORTED_VERSION, "Unsupported Protocol Version"),
        (WRONG_STATE, "Wrong Key Lifecycle State"),
    ];

    /// The name of a reason in the standard, or its number.
    pub(in super::super) fn name(reason: u32) -> String {
        let known = NAMES.iter().find(|(number, _)| *number == reason);
        known.map_or_else(|| format!("0x{reason:x}"), |(_, name)| (*name).to_owned())
    }
}
