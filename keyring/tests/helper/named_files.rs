//! All options, variables and arguments that name files: the same rules apply to each.

mod names;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::thread;

use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use pagevault_keystore::Scope;
use pagevault_keystore::log::Log;
use pagevault_keystore::storage::FileStorage;
use serde_json::{Value, json};

use crate::bench::{Bench, CONTEXT, chmod, command, reply, run, stderr, wrap_action};
use names::NAMED;

/// Nobody listens at this address.
const NOWHERE: &str = "https://127.0.0.1:9";

const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    KeyFile,
    Program,
    Secret,
    /// Other users may read it.
    Public,
}

impl Kind {
    /// Modes that are accepted, and modes that are refused.
    fn modes(self) -> (&'static [u32], &'static [u32]) {
        match self {
            Kind::KeyFile => (&[0o600, 0o400], &[0o640, 0o604, 0o620, 0o644, 0o660, 0o666]),
            Kind::Program => (&[0o755, 0o700, 0o555], &[0o775, 0o757, 0o777, 0o1777]),
            Kind::Secret => {
                (&[0o600, 0o400, 0o640, 0o440], &[0o644, 0o604, 0o620, 0o660, 0o646, 0o666])
            }
            Kind::Public => {
                (&[0o600, 0o640, 0o644, 0o444, 0o755], &[0o664, 0o620, 0o646, 0o666, 0o1666])
            }
        }
    }
}

/// A place where a file can be named, the kind of the file, and how to use it.
struct Named {
    place: &'static str,
    kind: Kind,
    content: &'static str,
    ask: fn(&Bench, &Path) -> Outcome,
}

/// Whether the file was refused because another user could have read or changed it, and the
/// message.
type Outcome = (bool, String);

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A data directory with a keystore.
fn keystore(bench: &Bench) -> PathBuf {
    let data = bench.path("data");
    if !data.join("pagevault").exists() {
        let storage = FileStorage::new(&data.join("pagevault")).unwrap();
        Log::create(&storage, [7; 16], Scope::CLUSTER, &[]).unwrap();
    }
    data
}

/// A file of credentials that is accepted.
fn word(bench: &Bench) -> PathBuf {
    let path = bench.path("keys/word");
    fs::write(&path, "x").unwrap();
    chmod(&path, 0o600);
    path
}

fn options(bench: &Bench, kind: &str, options: &Value) -> Outcome {
    serve(bench, kind, options, json!("check_options"), &[])
}

fn vault(bench: &Bench, auth: &Value) -> Outcome {
    options(bench, "vault", &json!({"address": NOWHERE, "auth": auth}))
}

fn aws(bench: &Bench, variable: &str, path: &Path) -> Outcome {
    let options = json!({"region": "eu-central-1", "endpoint": NOWHERE});
    serve(bench, "aws_kms", &options, wrap_action(&[1; 32]), &[(variable, path)])
}

/// The helper's outcome for an operation, in an environment that names no other files.
fn serve(
    bench: &Bench,
    kind: &str,
    options: &Value,
    action: Value,
    environment: &[(&str, &Path)],
) -> Outcome {
    let provider = json!({"name": "x", "kind": kind, "options": options, "programs": true});
    let operation = json!({"provider": provider, "key": "x", "context": CONTEXT, "action": action});
    let mut command = command(&["serve"]);
    for variable in ["AWS_PROFILE", "AWS_CONFIG_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"] {
        command.env_remove(variable);
    }
    command.env("AWS_EC2_METADATA_DISABLED", "true").env("HOME", "/nonexistent");
    let mut child = command.envs(environment.iter().copied()).spawn().unwrap();
    let request = bench.request(10_000, vec![operation]).to_string();
    child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
    let outcome = reply(&child.wait_with_output().unwrap())["results"][0].clone();
    (outcome["failed"]["class"] == "insecure", outcome.to_string())
}

/// The same for a command line, whose errors do not show their class.
fn program(line: &[&str]) -> Outcome {
    let output = run(line);
    let said = stderr(&output);
    let reasons = [
        "can be changed by other users",
        "is accessible to",
        "belongs to another user",
        "is not safe",
    ];
    (reasons.iter().any(|reason| said.contains(reason)), said)
}

impl Named {
    #[track_caller]
    fn taken(&self, bench: &Bench, path: &Path, why: &str) {
        let (refused, said) = (self.ask)(bench, path);
        assert!(!refused, "{}, {why}: {said}", self.place);
    }

    #[track_caller]
    fn refused(&self, bench: &Bench, path: &Path, why: &str) {
        let (refused, said) = (self.ask)(bench, path);
        assert!(refused, "{}, {why}: {said}", self.place);
    }

    /// Creates a file of this kind in a directory of its own.
    fn lay(&self, bench: &Bench) -> PathBuf {
        let directory = bench.path("keys/deep");
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("named");
        fs::write(&path, self.content).unwrap();
        chmod(&path, self.kind.modes().0[0]);
        path
    }
}

/// Runs tests for several names in parallel.
fn each(names: impl Fn(&Named) -> bool, test: impl Fn(&Named) + Sync) {
    let named: Vec<&Named> = NAMED.iter().filter(|named| names(named)).collect();
    for some in named.chunks(4) {
        thread::scope(|scope| {
            for named in some {
                scope.spawn(|| test(named));
            }
        });
    }
}

#[test]
fn files_of_other_users_are_refused() {
    each(
        |_| true,
        |named| {
            let bench = Bench::new();
            let path = named.lay(&bench);
            let (good, bad) = named.kind.modes();
            for mode in good {
                chmod(&path, *mode);
                named.taken(&bench, &path, &format!("mode {mode:o}"));
            }
            for mode in bad {
                chmod(&path, *mode);
                named.refused(&bench, &path, &format!("mode {mode:o}"));
            }
            chmod(&path, good[0]);
            if geteuid().is_root() {
                chown(&path, Some(65534), None).unwrap();
                named.refused(&bench, &path, "another owner");
                chown(&path, Some(0), None).unwrap();
            }
        },
    );
}

#[test]
fn paths_that_other_users_control_are_refused() {
    each(
        |_| true,
        |named| {
            let bench = Bench::new();
            let path = named.lay(&bench);
            for name in ["keys/deep", "keys"] {
                let directory = bench.path(name);
                for mode in [0o755, 0o750, 0o1777, 0o1770] {
                    chmod(&directory, mode);
                    named.taken(&bench, &path, &format!("{name} of mode {mode:o}"));
                }
                for mode in [0o777, 0o770, 0o707, 0o2775] {
                    chmod(&directory, mode);
                    named.refused(&bench, &path, &format!("{name} of mode {mode:o}"));
                }
                chmod(&directory, 0o700);
                if geteuid().is_root() {
                    chown(&directory, Some(65534), None).unwrap();
                    named.refused(&bench, &path, &format!("{name} of another owner"));
                    chown(&directory, Some(0), None).unwrap();
                }
            }
            // Through a link to the directory, as mounts and certificate managers create them.
            let links = bench.path("links");
            fs::create_dir(&links).unwrap();
            let link = links.join("to-deep");
            symlink(bench.path("keys/deep"), &link).unwrap();
            let path = link.join("named");
            chmod(&links, 0o1777);
            named.taken(&bench, &path, "by our link");
            if geteuid().is_root() {
                lchown(&link, Some(65534), None).unwrap();
                named.refused(&bench, &path, "by the link of another user");
                lchown(&link, Some(0), None).unwrap();
            }
            chmod(&links, 0o777);
            named.refused(&bench, &path, "by a link that others can exchange");
        },
    );
}

/// The layout of projected tokens, Secrets and ConfigMaps by the kubelet
/// (pkg/volume/util/atomic_writer.go): links to a directory whose name changes with the content, in
/// a directory of mode 1777 in memory; with `fsGroup`, files get its group.
#[test]
fn mounts_of_kubernetes_are_accepted() {
    each(
        |named| matches!(named.kind, Kind::Public | Kind::Secret),
        |named| {
            let bench = Bench::new();
            let mount = bench.path("mount");
            fs::create_dir_all(mount.join("..2026_11_22_10_00_00.1")).unwrap();
            for (directory, mode) in [("", 0o1777), ("..2026_11_22_10_00_00.1", 0o755)] {
                chmod(&mount.join(directory), mode);
            }
            let file = mount.join("..2026_11_22_10_00_00.1/named");
            fs::write(&file, named.content).unwrap();
            symlink("..2026_11_22_10_00_00.1", mount.join("..data")).unwrap();
            symlink("..data/named", mount.join("named")).unwrap();
            let path = mount.join("named");
            // With defaultMode 0440 or 0400; service account tokens have 0644 or, with fsGroup,
            // 0640.
            let modes: &[u32] = match named.kind {
                Kind::Public => &[0o644, 0o640, 0o600, 0o440],
                _ => &[0o640, 0o440, 0o400],
            };
            for mode in modes {
                chmod(&file, *mode);
                named.taken(&bench, &path, &format!("mounted with mode {mode:o}"));
            }
            chmod(&mount, 0o3777);
            named.taken(&bench, &path, "mounted for a group");
        },
    );
}

/// Opening does not wait for pipes, and large files are not read.
#[test]
fn endless_files_are_not_read() {
    each(
        |_| true,
        |named| {
            let bench = Bench::new();
            let path = named.lay(&bench);
            let fine =
                |said: &str| !said.contains("could not finish") && !said.contains("deadline");
            fs::remove_file(&path).unwrap();
            mkfifo(&path, Mode::S_IRWXU).unwrap();
            let (_, said) = (named.ask)(&bench, &path);
            assert!(fine(&said), "{}: {said}", named.place);
            fs::remove_file(&path).unwrap();
            if named.kind == Kind::Program {
                return;
            }
            // A sparse file, which takes no space and would take long to read.
            fs::File::create(&path).unwrap().set_len(1 << 36).unwrap();
            chmod(&path, 0o600);
            let (_, said) = (named.ask)(&bench, &path);
            assert!(fine(&said), "{}: {said}", named.place);
        },
    );
}
