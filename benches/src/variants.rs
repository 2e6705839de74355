//! The variants to compare.

use clap::ValueEnum;
use pagevault_tests::Settings;

use crate::others::Other;

/// A way to run the server, or to create a database in an existing cluster.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Variant {
    /// PostgreSQL without the library.
    Stock,
    /// The library is loaded, nothing is encrypted.
    Loaded,
    /// Relations are encrypted.
    Relations,
    /// Relations, WAL and temporary data are encrypted.
    Everything,
    /// As `relations`, by `aes-256-xts`: pages are not authenticated.
    RelationsXts,
    /// As `everything`, by `aes-256-xts`: pages are not authenticated.
    EverythingXts,
    /// An existing cluster: a database without encryption.
    #[value(skip)]
    Plain,
    /// An existing cluster: a database whose relations are encrypted.
    #[value(skip)]
    Encrypted,
    /// A server of the user's.
    #[value(skip)]
    Other(&'static Other),
}

/// The default authenticates pages, because the clusters have data checksums.
const XTS: &str = "pagevault.cipher = 'aes-256-xts'";

impl Variant {
    /// Variants with their own server that are compared by default; the first is the baseline.
    pub(crate) const OWN: [Variant; 4] =
        [Variant::Stock, Variant::Loaded, Variant::Relations, Variant::Everything];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Variant::Stock => "stock",
            Variant::Loaded => "loaded",
            Variant::Relations => "relations",
            Variant::Everything => "everything",
            Variant::RelationsXts => "relations-xts",
            Variant::EverythingXts => "everything-xts",
            Variant::Plain => "plain",
            Variant::Encrypted => "encrypted",
            Variant::Other(other) => &other.name,
        }
    }

    /// Whether tables created by the suites are encrypted.
    pub(crate) fn seals(self) -> bool {
        !matches!(self, Variant::Stock | Variant::Loaded | Variant::Plain | Variant::Other(_))
    }

    /// Whether WAL is encrypted.
    pub(crate) fn seals_wal(self) -> bool {
        matches!(self, Variant::Everything | Variant::EverythingXts)
    }

    /// Whether the library is loaded.
    pub(crate) fn has_library(self) -> bool {
        !matches!(self, Variant::Stock | Variant::Other(_))
    }

    /// Settings for a server of this variant, in addition to the common ones.
    pub(crate) fn settings(self, common: Settings) -> Settings {
        match self {
            Variant::Stock => common.without_preload(),
            Variant::Other(other) => common.without_preload().on(other.installation),
            Variant::Loaded | Variant::Plain | Variant::Encrypted => common,
            Variant::Relations => common
                .conf("pagevault.default_encryption = on")
                .conf("pagevault.wal_encryption = off")
                .conf("pagevault.temp_encryption = off"),
            Variant::Everything => common
                .conf("pagevault.default_encryption = on")
                .conf("pagevault.temp_encryption = on"),
            Variant::RelationsXts => Variant::Relations.settings(common).conf(XTS),
            Variant::EverythingXts => Variant::Everything.settings(common).conf(XTS),
        }
    }
}
