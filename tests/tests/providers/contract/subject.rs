//! A provider with its service, and what happens to that.

use std::ops::Range;

use anyhow::{Result, bail};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;

use super::{KEY, NEXT, Point};

/// Points that are passed with one service, in this order: they leave it as they found it, or worse
/// and worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Keys,
    Versions,
    States,
    Outages,
    /// A server uses it.
    Moved,
}

impl Group {
    pub(super) fn points(self) -> &'static [Point] {
        match self {
            Group::Keys => &[
                Point::Check,
                Point::Wraps,
                Point::Binding,
                Point::ChangedBytes,
                Point::WrongKey,
                Point::AnotherKeyIsNotUsed,
                Point::AnotherKeyIsTold,
            ],
            Group::Versions => &[Point::Rotation],
            Group::States => &[Point::Disabled, Point::Enabled, Point::Deleted, Point::Destroyed],
            Group::Outages => &[Point::Throttled, Point::Failing, Point::Slow, Point::Unreachable],
            Group::Moved => &[Point::Moved],
        }
    }
}

/// What a service is brought into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The first version of the key is disabled, and enabled again.
    Disabled,
    Enabled,
    /// The key is deleted, and can be restored.
    Deleted,
    /// The key is deleted for ever.
    Destroyed,
    /// The service limits the rate of this many requests.
    Throttled(usize),
    /// The service has a failure of its own, this many times.
    Failing(usize),
    /// The service does not answer.
    Silent,
    /// Nobody is there any more.
    Away,
    /// Another key is used, or all replies are about another key.
    AnotherKey,
    /// All of this is over, except what happened to keys.
    Repaired,
}

pub(crate) trait Subject: Sized + Send + 'static {
    /// Its name in tests: the kind of the provider, or one of several services of that kind.
    const NAME: &str;
    /// What it needs.
    const NEEDS: &[Server] = &[];
    /// Points that it cannot have, and why.
    const LACKS: &[(Point, &str)] = &[];
    /// Lengths of secrets. Those of pagevault have 32 bytes.
    const LENGTHS: &[usize] = &[0, 1, 31, 64, 5000];
    /// Every how many bytes one is changed. Not each, where each costs a process.
    const STRIDE: usize = 1;
    /// Classes of refusals of damaged wrapped keys.
    const REFUSALS: &[&str] = &["wrong_ciphertext", "key_missing"];
    /// A wrapped key names its master key, which unwraps it whatever the request names.
    const FOLLOWS_WRAPPED: bool = false;
    /// Names of keys become parts of addresses, so strange names must not be sent.
    const NAMES_IN_ADDRESSES: bool = false;
    /// Names that nobody gives to keys.
    const STRANGE: &[&str] = &["a/b", "../db-kek", "db-kek?x=y", "db-kek:encrypt", "a b", "\u{e4}"];
    /// A request waits for a service that is away.
    const WAITS: bool = true;
    /// A disabled version still wraps.
    const DISABLED_WRAPS: bool = false;

    fn start(group: Group) -> Result<Self>;
    /// The provider, as its service is now.
    fn provider(&self) -> Provider;
    /// The name of its key, and of another.
    fn key(&self) -> String {
        KEY.to_owned()
    }
    fn next(&self) -> String {
        NEXT.to_owned()
    }
    /// A name that no key has.
    fn missing(&self) -> String {
        "typo".to_owned()
    }
    /// Why this service in particular cannot have a point.
    fn cannot(&self, _: Point) -> Option<&'static str> {
        None
    }
    /// Bytes of a wrapped key that its service in the tests does not look at, but the real one.
    fn unread(&self) -> Range<usize> {
        0..0
    }
    /// Changes the service.
    fn bring(&mut self, state: State) -> Result<()>;
    /// Number of attempts to use a key since the last call.
    fn uses(&mut self) -> Result<usize>;
    /// Called where a new version needs a later time than the one before.
    fn wait_for_next_version(&self) {}
}

/// For states of points that a subject declares not to have.
pub(super) fn never(state: State) -> Result<()> {
    bail!("{state:?} is not possible here")
}
