//! The places where files are named.

use std::fs;

use serde_json::{Value, json};

use super::{
    CERTIFICATE, Kind, NOWHERE, Named, Outcome, aws, keystore, options, program, serve, text,
    vault, word,
};
use crate::bench::{Bench, chmod, wrap_action};

/// A vault to which nothing is sent.
const VAULT: &str = "https://db.vault.azure.net";

fn azure(bench: &Bench, auth: &Value) -> Outcome {
    options(bench, "azure_key_vault", &json!({"vault": VAULT, "auth": auth}))
}

pub(super) const NAMED: &[Named] = &[
    Named {
        place: "file: path",
        kind: Kind::KeyFile,
        content: "",
        ask: |bench, path| options(bench, "file", &json!({"path": path})),
    },
    Named {
        place: "command: unwrap",
        kind: Kind::Program,
        content: "#!/bin/sh\n",
        ask: |bench, path| {
            options(bench, "command", &json!({"wrap": ["/bin/true"], "unwrap": [path]}))
        },
    },
    Named {
        place: "command: wrap",
        kind: Kind::Program,
        content: "#!/bin/sh\n",
        ask: |bench, path| {
            options(bench, "command", &json!({"wrap": [path], "unwrap": ["/bin/true"]}))
        },
    },
    Named {
        place: "command: rotate",
        kind: Kind::Program,
        content: "#!/bin/sh\n",
        ask: |bench, path| {
            options(
                bench,
                "command",
                &json!({"wrap": ["/bin/true"], "unwrap": ["/bin/true"], "rotate": [path]}),
            )
        },
    },
    Named {
        place: "vault: ca_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| {
            let auth = json!({"token_file": word(bench)});
            options(bench, "vault", &json!({"address": NOWHERE, "ca_file": path, "auth": auth}))
        },
    },
    Named {
        place: "vault: token_file",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| vault(bench, &json!({"token_file": path})),
    },
    Named {
        place: "vault: role_id_file",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| {
            vault(bench, &json!({"approle": {"role_id_file": path, "secret_id_file": word(bench)}}))
        },
    },
    Named {
        place: "vault: secret_id_file",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| {
            vault(bench, &json!({"approle": {"role_id_file": word(bench), "secret_id_file": path}}))
        },
    },
    Named {
        place: "vault: jwt_file",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| vault(bench, &json!({"kubernetes": {"role": "db", "jwt_file": path}})),
    },
    Named {
        place: "vault: cert_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| {
            vault(bench, &json!({"cert": {"cert_file": path, "key_file": word(bench)}}))
        },
    },
    Named {
        place: "vault: key_file",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| {
            let certificate = bench.path("keys/certificate");
            fs::write(&certificate, CERTIFICATE).unwrap();
            vault(bench, &json!({"cert": {"cert_file": certificate, "key_file": path}}))
        },
    },
    Named {
        place: "aws_kms: ca_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| options(bench, "aws_kms", &json!({"ca_file": path})),
    },
    Named {
        place: "aws_kms: credentials_file",
        kind: Kind::Secret,
        content: "",
        ask: |bench, path| options(bench, "aws_kms", &json!({"credentials_file": path})),
    },
    Named {
        place: "AWS_CONFIG_FILE",
        kind: Kind::Public,
        content: "",
        ask: |bench, path| aws(bench, "AWS_CONFIG_FILE", path),
    },
    Named {
        place: "AWS_SHARED_CREDENTIALS_FILE",
        kind: Kind::Secret,
        content: "",
        ask: |bench, path| aws(bench, "AWS_SHARED_CREDENTIALS_FILE", path),
    },
    Named {
        place: "AWS_WEB_IDENTITY_TOKEN_FILE",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| aws(bench, "AWS_WEB_IDENTITY_TOKEN_FILE", path),
    },
    Named {
        place: "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| aws(bench, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", path),
    },
    Named {
        place: "web_identity_token_file of a profile",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| {
            let profile = bench.path("keys/profile");
            let text =
                format!("[default]\nrole_arn = r\nweb_identity_token_file = {}\n", path.display());
            fs::write(&profile, text).unwrap();
            chmod(&profile, 0o600);
            options(bench, "aws_kms", &json!({"credentials_file": profile}))
        },
    },
    Named {
        place: "azure_key_vault: ca_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| {
            options(bench, "azure_key_vault", &json!({"vault": VAULT, "ca_file": path}))
        },
    },
    Named {
        place: "azure_key_vault: secret_file",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| {
            let login = json!({"tenant": "t", "client_id": "c", "secret_file": path});
            azure(bench, &json!({"client_secret": login}))
        },
    },
    Named {
        place: "azure_key_vault: cert_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| {
            let key = word(bench);
            let login =
                json!({"tenant": "t", "client_id": "c", "cert_file": path, "key_file": key});
            azure(bench, &json!({"client_certificate": login}))
        },
    },
    Named {
        place: "azure_key_vault: key_file",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| {
            let certificate = bench.path("keys/certificate");
            fs::write(&certificate, CERTIFICATE).unwrap();
            let login = json!({"tenant": "t", "client_id": "c", "cert_file": certificate,
                "key_file": path});
            azure(bench, &json!({"client_certificate": login}))
        },
    },
    Named {
        place: "azure_key_vault: token_file",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| {
            let login = json!({"tenant": "t", "client_id": "c", "token_file": path});
            azure(bench, &json!({"workload_identity": login}))
        },
    },
    Named {
        place: "gcp_kms: ca_file",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| options(bench, "gcp_kms", &json!({"ca_file": path})),
    },
    Named {
        place: "gcp_kms: credentials_file",
        kind: Kind::Secret,
        content: "{}",
        ask: |bench, path| options(bench, "gcp_kms", &json!({"credentials_file": path})),
    },
    Named {
        place: "GOOGLE_APPLICATION_CREDENTIALS",
        kind: Kind::Secret,
        content: "{}",
        ask: |bench, path| {
            let variable = "GOOGLE_APPLICATION_CREDENTIALS";
            let options = json!({"key_ring": "projects/p/locations/l/keyRings/r"});
            serve(bench, "gcp_kms", &options, wrap_action(&[1; 32]), &[(variable, path)])
        },
    },
    Named {
        place: "gcp_kms: credential_source",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| {
            let config = bench.path("keys/federation");
            let text = json!({"type": "external_account", "audience": "a",
                "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": "https://sts.googleapis.com/v1/token",
                "credential_source": {"file": path}});
            fs::write(&config, text.to_string()).unwrap();
            chmod(&config, 0o600);
            let options = json!({"credentials_file": config,
                "key_ring": "projects/p/locations/l/keyRings/r"});
            serve(bench, "gcp_kms", &options, wrap_action(&[1; 32]), &[])
        },
    },
    Named {
        place: "SSL_CERT_FILE to Vault",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| {
            let options = json!({"address": NOWHERE, "auth": {"token_file": word(bench)}});
            serve(bench, "vault", &options, json!("check_options"), &[("SSL_CERT_FILE", path)])
        },
    },
    Named {
        place: "SSL_CERT_FILE to AWS",
        kind: Kind::Public,
        content: CERTIFICATE,
        ask: |bench, path| aws(bench, "SSL_CERT_FILE", path),
    },
    Named {
        place: "--providers",
        kind: Kind::Public,
        content: "{}",
        ask: |bench, path| {
            program(&["verify", text(&bench.path("data")), "--providers", text(path)])
        },
    },
    Named {
        place: "--identity",
        kind: Kind::Secret,
        content: "x",
        ask: |bench, path| {
            let data = bench.path("data");
            program(&[
                "escrow",
                "check",
                text(path),
                "--identity",
                text(path),
                "--data-directory",
                text(&data),
            ])
        },
    },
    Named {
        place: "an escrow bundle",
        kind: Kind::Public,
        content: "x",
        ask: |bench, path| {
            let identity = bench.path("keys/identity");
            fs::write(
                &identity,
                "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX\n",
            )
            .unwrap();
            chmod(&identity, 0o600);
            let data = keystore(bench);
            program(&[
                "escrow",
                "check",
                text(path),
                "--identity",
                text(&identity),
                "--data-directory",
                text(&data),
            ])
        },
    },
];
