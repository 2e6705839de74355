//! New versions of keys.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::gcp::Gcp;

use crate::Test;
use crate::contract::{CONTEXT, KEY, SECRET, Subject, rotate, says};

pub(super) const TESTS: &[Test] = &[
    Test { name: "gcp_kms::a_rotation_elsewhere_is_followed", needs: &[], run: elsewhere },
    Test { name: "gcp_kms::an_interrupted_rotation_is_continued", needs: &[], run: interrupted },
    Test { name: "gcp_kms::key_material_is_waited_for", needs: &[], run: waited_for },
    Test { name: "gcp_kms::servers_may_rotate_at_once", needs: &[], run: at_once },
];

fn elsewhere() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    // By the schedule of Cloud KMS.
    gcp.with_key(KEY, |key| -> Result<()> {
        let number = key.add_version(0)?;
        key.set_primary(Some(number));
        Ok(())
    })??;
    ensure!(provider.rotate(KEY, &wrapped)? == 2);
    ensure!(gcp.with_key(KEY, |key| key.count())? == 2, "it was rotated again");
    // The former version is disabled: what it wrapped is refused, what the new one wraps is not.
    let (again, _) = provider.rewrap(KEY, KEY, CONTEXT, &wrapped)?;
    gcp.with_key(KEY, |key| key.set_state(1, "DISABLED"))?;
    ensure!(provider.unwrap(KEY, CONTEXT, &again)? == SECRET);
    let action = crate::contract::unwrap(&wrapped);
    let failure = provider.refused(KEY, CONTEXT, action, "key_disabled")?;
    says(&failure, "current state is: DISABLED")
}

fn interrupted() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    gcp.server.state().granted.remove("cloudkms.cryptoKeys.update");
    let failure = provider.refused(KEY, "", rotate(&wrapped), "denied")?;
    says(&failure, "cloudkms.cryptoKeys.update")?;
    ensure!(gcp.with_key(KEY, |key| key.count())? == 2);
    let (_, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version == 1, "a version is used before it is the primary one");
    gcp.server.state().granted.insert("cloudkms.cryptoKeys.update");
    ensure!(provider.rotate(KEY, &wrapped)? == 2);
    ensure!(gcp.with_key(KEY, |key| key.count())? == 2, "another version was made");
    // Versions that cannot be used are left out. There are several pages of them.
    for state in ["DISABLED", "DESTROYED", "DESTROY_SCHEDULED", "ENABLED", "DISABLED"] {
        gcp.with_key(KEY, |key| -> Result<()> {
            let number = key.add_version(0)?;
            key.set_state(number, state);
            Ok(())
        })??;
    }
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(provider.rotate(KEY, &wrapped)? == 6);
    ensure!(gcp.with_key(KEY, |key| key.count())? == 7, "another version was made");
    Ok(())
}

fn waited_for() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    gcp.server.state().pending = 3;
    ensure!(provider.rotate(KEY, &wrapped)? == 2);
    let (wrapped, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version == 2);
    gcp.server.state().pending = u32::MAX;
    provider.deadline_ms = 3000;
    let failure = provider.refused(KEY, "", rotate(&wrapped), "deadline")?;
    says(&failure, "has no key material yet")?;
    let made = gcp.with_key(KEY, |key| key.count())?;
    let _ = provider.refused(KEY, "", rotate(&wrapped), "deadline")?;
    ensure!(gcp.with_key(KEY, |key| key.count())? == made, "another version was made");
    Ok(())
}

fn at_once() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    let made = std::thread::scope(|scope| {
        let rotate = || scope.spawn(|| provider.rotate(KEY, &wrapped));
        [rotate(), rotate(), rotate()].map(|one| one.join())
    });
    for version in made {
        let version = version.map_err(|_| anyhow::anyhow!("panic"))??;
        ensure!((2..=4).contains(&version), "{version}");
    }
    let (newest, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version >= 2);
    for wrapped in [&wrapped, &newest] {
        ensure!(provider.unwrap(KEY, CONTEXT, wrapped)? == SECRET);
    }
    Ok(())
}
