//! The provider `kmip` with PyKMIP. What PyKMIP lacks is added to it (`pykmip_server.py`): Re-key,
//! links, the attribute Extractable, and faults.

mod access;
mod contract;
mod keys;
mod outages;
mod rotation;
mod server;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    [
        access::tests(),
        contract::tests(),
        keys::tests(),
        outages::tests(),
        rotation::tests(),
        server::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
