//! .
pub(crate) fn is_up_to_date() -> anyhow::Result<()> {
    Ok(())
}
