//! Pages that are not authentic: changed on disk, moved, or torn.

use pagevault_cipher::page::{self, Page};

use super::io::{Cause, PageFault, count_refusal, is_map};
use super::undecided;
use crate::pg::process::{data_checksums, is_not_consistent_yet};

/// What follows when [`super::io::try_open`] has failed. Everything but a page that is not
/// authentic is counted already.
#[cold]
pub(crate) fn refuse(
    fault: PageFault,
    fork: i32,
    block: u32,
    page: &mut Page,
) -> Result<(), PageFault> {
    let file = fault.file;
    if fault.cause != Cause::NotAuthentic {
        return Err(fault);
    }
    if !is_map(fork) && is_not_consistent_yet() && undecided::note_torn(file.file, fork, block) {
        page::placeholder(page, block, data_checksums());
        return Ok(());
    }
    count_refusal(file);
    // As PostgreSQL reads a damaged one (`vm_readbuf`, `fsm_readbuf`). It may be torn: some changes
    // of maps are not logged.
    if is_map(fork) {
        page.fill(0);
        return Ok(());
    }
    Err(fault)
}
