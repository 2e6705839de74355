pub(crate) fn report(_: &[crate::results::Results]) -> anyhow::Result<String> {
    Ok(String::new())
}
