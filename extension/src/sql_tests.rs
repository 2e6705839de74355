//! Tests inside a server (`cargo pgrx test`) that need no key provider. Others are tests on whole
//! clusters (`tests/`).

#[pgrx::pg_schema]
mod tests {
    use std::time::{Duration, Instant};

    use pagevault_keystore::protocol::ErrorClass;
    use pagevault_keystore::{KeyVersion, Lsn, Scope};
    use pgrx::prelude::*;
    use pgrx::spi;

    use crate::keys::provider::refusal;
    use crate::pg::locks::KeystoreLock;
    use crate::pg::mapping::{MemoryKind, Region};
    use crate::pg::worker;
    use crate::policy::label::{self, Label};
    use crate::shmem::control::{self, Control};
    use crate::shmem::health::{Health, OperationFailure};
    use crate::shmem::secrets::{self, Revocation, Secrets, State};

    fn database(oid: u32) -> Scope {
        Scope::database(oid)
    }

    fn version(number: u32) -> KeyVersion {
        KeyVersion::new(number).unwrap_or(KeyVersion::LAST)
    }

    #[pg_test]
    fn is_loaded_from_shared_preload_libraries() -> spi::Result<()> {
        let loaded = Spi::get_one::<bool>("SELECT loaded FROM pagevault.status")?;
        assert_eq!(loaded, Some(true));
        Ok(())
    }

    /// Whoever has waited for something else has reset the latch that came with it.
    #[pg_test]
    fn a_reload_before_a_wait_ends_it() {
        worker::as_after_a_reload();
        let begin = Instant::now();
        worker::wait_in_worker(Duration::from_secs(600));
        assert!(begin.elapsed() < Duration::from_secs(300));
    }

    #[pg_test(error = "key provider \"nobody\" does not exist")]
    fn unknown_provider_is_refused() -> spi::Result<()> {
        Spi::run("SELECT pagevault.set_cluster_master_key('nobody', 'main')")
    }

    #[pg_test(error = "cannot encrypt: no master key is set")]
    fn without_a_master_key_nothing_is_encrypted() -> spi::Result<()> {
        Spi::run("CREATE TABLE t (a int)")?;
        Spi::run("SELECT pagevault.encrypt('t')")
    }

    #[pg_test(error = "cannot encrypt: no master key is set")]
    fn default_encryption_fails_closed() -> spi::Result<()> {
        Spi::run("SET pagevault.default_encryption = on")?;
        Spi::run("CREATE TABLE t (a int)")
    }

    #[pg_test(error = "invalid pagevault label \"secret\"")]
    fn label_is_checked() -> spi::Result<()> {
        Spi::run("CREATE TABLE t (a int)")?;
        Spi::run("SECURITY LABEL FOR pagevault ON TABLE t IS 'secret'")
    }

    #[pg_test(error = "unknown cipher \"rot13\" in pagevault label")]
    fn cipher_is_checked() -> spi::Result<()> {
        Spi::run("CREATE TABLE t (a int)")?;
        Spi::run("SELECT pagevault.encrypt('t', 'rot13')")
    }

    #[pg_test(error = "cannot encrypt: no master key is set")]
    fn without_a_master_key_no_label_says_encrypted() -> spi::Result<()> {
        Spi::run("SECURITY LABEL FOR pagevault ON SCHEMA public IS 'encrypted'")
    }

    #[pg_test]
    fn a_plain_table_is_not_encrypted() -> spi::Result<()> {
        Spi::run("CREATE TABLE t AS SELECT 1 AS a")?;
        let encrypted = Spi::get_one::<bool>("SELECT pagevault.is_encrypted('t')")?;
        assert_eq!(encrypted, Some(false));
        Ok(())
    }

    #[pg_test]
    fn no_writing_function_is_executable_by_everyone() -> spi::Result<()> {
        let open = Spi::get_one::<String>(
            "SELECT string_agg(proname, ', ' ORDER BY proname) FROM pg_proc
              WHERE pronamespace = 'pagevault'::regnamespace
                AND has_function_privilege('public', oid, 'EXECUTE')",
        )?;
        assert_eq!(
            open.as_deref(),
            Some(
                "data_key_rows, is_encrypted, key_group_names, relation_rows, status_rows, wait_for_rekey, wait_for_rekey, wait_for_rekey, wait_for_rekey"
            )
        );
        Ok(())
    }

    #[pg_test]
    fn labels_are_parsed() {
        assert!(matches!(label::parse("plaintext"), Ok(Label::Plaintext)));
        assert!(matches!(label::parse(" encrypted "), Ok(Label::Encrypted(None))));
        assert!(matches!(label::parse("encrypted aes-128-xts"), Ok(Label::Encrypted(Some(_)))));
        for wrong in [
            "",
            "Encrypted",
            "encrypted rot13",
            "plain",
            "plaintext plaintext",
            "encrypted aes-128-xts x",
        ] {
            assert!(label::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[pg_test]
    fn database_keys_are_locked_until_unlocked() -> std::io::Result<()> {
        let table = Secrets::new(Region::map(secrets::slots_needed(0), MemoryKind::Sparse)?);
        let key = pagevault_cipher::Secret32::from_bytes(&[7; 32]);
        assert!(table.announce(database(5), version(1)).is_ok());
        assert!(
            table.state(database(5), version(1)) == Some(State::Locked)
                && table.get(database(5), version(1)).is_none()
        );
        assert!(table.unlock(database(5), version(1), &key).is_ok());
        assert!(table.state(database(5), version(1)) == Some(State::Ready));
        assert!(table.get(database(5), version(1)).is_some_and(|read| read.matches(key.expose())));
        assert!(table.unlock(database(5), version(2), &key).is_ok());
        assert_eq!(table.newest(database(5)), Some(version(2)));
        assert_eq!(table.newest(database(0)), None);
        Ok(())
    }

    #[pg_test]
    fn revoked_keys_stay_readable_until_refused_and_are_never_lost() -> std::io::Result<()> {
        let table = Secrets::new(Region::map(secrets::slots_needed(0), MemoryKind::Sparse)?);
        let key = pagevault_cipher::Secret32::from_bytes(&[7; 32]);
        for (scope, number) in [(5, 1), (5, 2), (6, 1)] {
            assert!(table.unlock(database(scope), version(number), &key).is_ok());
        }
        assert!(table.announce(database(5), version(3)).is_ok());
        let (since, begun) = (1 << 50 | 17, std::time::Duration::from_micros(1 << 40 | 5));
        let revocation = Revocation { since, begun, cause: ErrorClass::KeyDisabled };
        table.revoke(database(5), revocation, false);
        assert!(!table.any_refused() && !table.is_refused(database(5)));
        assert_eq!(table.revocation(database(5)), Some(revocation));
        assert_eq!(table.revocation(database(6)), None);
        table.revoke(database(5), revocation, true);
        assert!(
            table.any_refused() && table.is_refused(database(5)) && !table.is_refused(database(6))
        );
        let states = [(5, 1), (5, 2), (5, 3), (6, 1)]
            .map(|(scope, number)| table.state(database(scope), version(number)));
        let (refused, locked, ready) = (State::Refused, State::Locked, State::Ready);
        assert_eq!(states, [Some(refused), Some(refused), Some(locked), Some(ready)]);
        // The key is still there, and cannot be replaced by another.
        let other = pagevault_cipher::Secret32::from_bytes(&[8; 32]);
        assert!(table.unlock(database(5), version(1), &other).is_ok());
        assert!(table.get(database(5), version(1)).is_some_and(|read| read.matches(key.expose())));
        assert!(table.restore(database(5)) && !table.restore(database(5)));
        assert!(!table.any_refused() && table.state(database(5), version(2)) == Some(State::Ready));
        assert!(table.state(database(5), version(3)) == Some(State::Locked));
        Ok(())
    }

    #[pg_test]
    fn each_class_of_refusal_has_its_own_sqlstate_and_a_hint() {
        use ErrorClass::*;
        let network = [Unreachable, Tls, Sealed, Throttled, Deadline];
        let answers = [Unauthenticated, Denied, KeyMissing, KeyDisabled, WrongCiphertext];
        let defects = [BadOptions, BadRequest, Insecure, Internal];
        let classes = [&network[..], &answers, &defects].concat();
        let mut seen: Vec<PgSqlErrorCode> = Vec::new();
        for class in classes {
            let code = refusal::sqlstate(class);
            // Clients must be able to distinguish their own cancel request from a provider's
            // deadline.
            assert!(
                code != PgSqlErrorCode::ERRCODE_QUERY_CANCELED && !seen.contains(&code),
                "{class}"
            );
            seen.push(code);
            assert!(refusal::hint(class).ends_with('.'), "{class}");
        }
    }

    #[pg_test]
    fn health_is_kept_for_each_provider_and_truncated() -> std::io::Result<()> {
        let table = Region::<Health>::map(0, MemoryKind::Sparse)?.head;
        let lock = KeystoreLock::acquire();
        assert!(table.entry(&lock, "a").is_none());
        table.record(&lock, "a", 10, 1500, Ok(()));
        let text = "\u{e4}".repeat(1000);
        let failure = OperationFailure { class: "wrong_ciphertext", answered: false, text };
        table.record(&lock, "b", 20, 7, Err(&failure));
        table.record(&lock, "b", 30, 7, Err(&failure));
        let a = table.entry(&lock, "a");
        assert!(a.is_some_and(|a| a.reachable && a.latency_us == 1500 && a.last_error_at == 0));
        let b = table.entry(&lock, "b");
        assert!(b.as_ref().is_some_and(|b| !b.reachable && b.failures == 2 && b.latency_us == 0));
        assert!(b.is_some_and(|b| b.last_error_class == "wrong_ciphertext"
            && b.last_error.len() > 400
            && b.last_error.chars().all(|c| c == '\u{e4}')));
        table.forget(&lock, "a");
        assert!(table.entry(&lock, "a").is_none());
        for n in 0..100 {
            table.record(&lock, &format!("provider {n}"), 40, 7, Ok(()));
        }
        assert!(table.entry(&lock, "b").is_some_and(|b| b.last_error_at == 30));
        Ok(())
    }

    #[pg_test]
    fn a_full_table_of_database_keys_is_reported() -> std::io::Result<()> {
        let table = Secrets::new(Region::map(secrets::slots_needed(0), MemoryKind::Sparse)?);
        let announces = |number: &u32| table.announce(database(1), version(*number)).is_ok();
        let announced = |number: &u32| table.has_room() && announces(number);
        assert_eq!((1..).take_while(announced).count(), table.limit());
        // Recovery may use reserved slots beyond the limit.
        let room = (2000..).take_while(announces).count();
        assert_eq!((table.limit(), room), (1022 - 64, 64));
        assert_eq!(table.newest(database(1)), Some(version(2063)));
        let larger = Secrets::new(Region::map(secrets::slots_needed(5000), MemoryKind::Sparse)?);
        assert!(larger.limit() > 5000);
        Ok(())
    }

    #[pg_test]
    fn control_words_hold_the_ends_of_logs() -> std::io::Result<()> {
        let control = Control::new(Region::map(control::entries_needed(0), MemoryKind::Sparse)?);
        assert!(control.position(Scope::CLUSTER).is_none());
        control.set_keystore_id(&[9; 16]);
        let position = pagevault_keystore::log::Position {
            keystore_id: [9; 16],
            scope: database(4_294_967_294),
            generation: 3,
            end: 0x1_2345_6789,
            settled: 0x1_0000_0001,
            logged: Lsn::INVALID,
        };
        assert!(control.set_position(&position).is_ok());
        assert_eq!(control.position(database(4_294_967_294)), Some(position));
        control.set_unlock_failure("because");
        assert_eq!(control.unlock_failure(), "because");
        control.reset()?;
        assert!(control.position(database(4_294_967_294)).is_none());
        Ok(())
    }
}
