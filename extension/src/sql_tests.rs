//! Tests that run inside a server (`cargo pgrx test`).

#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    #[pg_test]
    fn is_loaded_from_shared_preload_libraries() {
        let loaded = Spi::get_one::<bool>("SELECT loaded FROM pagevault.status").unwrap();
        assert_eq!(loaded, Some(true));
    }

    #[pg_test(error = "key provider \"nobody\" does not exist")]
    fn unknown_provider_is_refused() {
        Spi::run("SELECT pagevault.set_cluster_master_key('nobody', 'main')").unwrap();
    }

    #[pg_test(error = "invalid pagevault label \"secret\"")]
    fn label_is_checked() {
        Spi::run("CREATE TABLE t (a int); SECURITY LABEL FOR pagevault ON TABLE t IS 'secret'")
            .unwrap();
    }
}
