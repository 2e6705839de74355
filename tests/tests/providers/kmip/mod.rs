//! The provider `kmip` with PyKMIP. What PyKMIP lacks is added to it (`pykmip_server.py`): Re-key,
//! links, the attribute Extractable, and faults.

mod access;
mod keys;
mod outages;
mod rotation;
mod server;
mod wrapping;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    [
        access::tests(),
        wrapping::tests(),
        keys::tests(),
        outages::tests(),
        rotation::tests(),
        server::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
