//! .
pub(crate) fn fit_together() -> anyhow::Result<()> {
    Ok(())
}
