//! docs/examples/cloudnativepg: the manifests are what CloudNativePG accepts, as far as its schemas
//! and its own checks say; the files belong together.
//!
//! `cloudnativepg/schemas.json` is the operator's own (Apache License 2.0, contributors to
//! CloudNativePG): config/crd/bases of v1.30.0 without descriptions and status. If
//! `PAGEVAULT_CNPG_CRDS` names that directory of a checkout, the file is compared with it, or made
//! anew (`PAGEVAULT_BLESS=1`). Not compared: `pattern`, and the rules in CEL
//! (`x-kubernetes-validations`).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

const SCHEMAS: &str = include_str!("cloudnativepg/schemas.json");

/// What the operator reserves for itself (`FixedConfigurationParameters`, pkg/postgres; the
/// parameters of ours that might be among them).
const FIXED: &[&str] = &["shared_preload_libraries", "archive_command", "restore_command"];

pub(crate) fn fit_together() -> Result<()> {
    let (catalog, cluster) = (manifest("catalog.yaml")?, manifest("cluster.yaml")?);
    let database = manifest("database.yaml")?;

    // The catalogue's entry is the cluster's extension.
    let reference = &cluster["spec"]["imageCatalogRef"];
    ensure!(reference["name"] == catalog["metadata"]["name"], "another catalogue");
    ensure!(reference["kind"] == catalog["kind"], "another kind of catalogue");
    let images = &catalog["spec"]["images"];
    let image = items(images).find(|image| image["major"] == reference["major"]);
    let extension = &image.context("no image of that major")?["extensions"][0];
    ensure!(extension["name"] == cluster["spec"]["postgresql"]["extensions"][0]["name"]);
    ensure!(extension["image"]["reference"].is_string(), "no image");
    ensure!(database["spec"]["cluster"]["name"] == cluster["metadata"]["name"], "another cluster");

    // `validateExtensionEnvVars` (cluster_webhook.go).
    for variable in items(&extension["env"]) {
        let name = variable["name"].as_str().context("name")?;
        let reserved = name.starts_with("PG") || name.starts_with("CNPG_");
        let dedicated = ["PATH", "LD_LIBRARY_PATH", "POD_NAME", "NAMESPACE", "CLUSTER_NAME"];
        ensure!(!reserved && !dedicated.contains(&name), "{name} is the operator's");
        let value = variable["value"].as_str().context("value")?;
        let rest = value.replace("${image_root}", "");
        ensure!(!rest.contains("${"), "an unknown placeholder in {value}");
    }
    let parameters = cluster["spec"]["postgresql"]["parameters"].as_object();
    for name in parameters.context("no parameters")?.keys() {
        ensure!(!FIXED.contains(&name.as_str()), "{name} is the operator's");
    }

    // The script reads what is projected.
    let setup = fs::read_to_string(path("setup.sql"))?;
    ensure!(!setup.to_lowercase().contains("alter system"), "ALTER SYSTEM is off");
    let initdb = &cluster["spec"]["bootstrap"]["initdb"];
    for (refs, file) in
        [("postInitSQLRefs", "setup.sql"), ("postInitApplicationSQLRefs", "application.sql")]
    {
        ensure!(initdb[refs]["configMapRefs"][0]["key"] == file, "{refs}: not {file}");
        ensure!(path(file).exists(), "there is no {file}");
    }
    let mut projected = Vec::new();
    for source in items(&cluster["spec"]["projectedVolumeTemplate"]["sources"]) {
        projected.extend(source["serviceAccountToken"]["path"].as_str());
        projected.extend(items(&source["configMap"]["items"]).filter_map(|i| i["path"].as_str()));
    }
    ensure!(projected.len() == 2, "{projected:?}");
    for path in projected {
        ensure!(setup.contains(&format!("\"/projected/{path}\"")), "the script reads no {path}");
    }
    Ok(())
}

/// The schemas are those of the operator's files.
pub(crate) fn schemas_are_the_operators() -> Result<()> {
    let Some(directory) = std::env::var_os("PAGEVAULT_CNPG_CRDS") else { return Ok(()) };
    let mut made = String::from("{\n");
    for (kind, file) in
        [("Cluster", "clusters"), ("Database", "databases"), ("ImageCatalog", "imagecatalogs")]
    {
        let path = Path::new(&directory).join(format!("postgresql.cnpg.io_{file}.yaml"));
        let definition = document(&fs::read_to_string(path)?)?;
        let version = &definition["spec"]["versions"][0];
        ensure!(version["name"] == "v1" && definition["spec"]["names"]["kind"] == kind);
        let mut top = without_descriptions(&version["schema"]["openAPIV3Schema"]);
        let mut take = |what: &str| {
            let fields = top["properties"].as_object_mut();
            fields.and_then(|fields| fields.remove(what)).unwrap_or_default()
        };
        take("status");
        let mut spec = take("spec");
        let fields = spec.as_object_mut().and_then(|spec| spec.remove("properties"));
        if made.len() > 2 {
            made.push_str(",\n");
        }
        made += &format!(
            "  \"{kind}\": {{\"top\": {top},\n    \"spec\": {spec},\n    \"fields\": {{\n"
        );
        // One line for each, so that differences can be read.
        let fields = fields.context("no fields")?;
        let lines = fields.as_object().into_iter().flatten();
        let lines: Vec<_> = lines.map(|(name, of)| format!("      \"{name}\": {of}")).collect();
        made += &(lines.join(",\n") + "\n    }}");
    }
    made.push_str("\n}\n");
    let path = crate::root().join("tests/tests/documentation/cloudnativepg/schemas.json");
    if std::env::var_os("PAGEVAULT_BLESS").is_some() {
        return Ok(fs::write(path, made)?);
    }
    let (made, known): (Value, Value) =
        (serde_json::from_str(&made)?, serde_json::from_str(&fs::read_to_string(path)?)?);
    ensure!(made == known, "the operator's schemas are others");
    Ok(())
}

/// A schema without its descriptions.
fn without_descriptions(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let is_text =
                |(name, value): &(&String, &Value)| *name == "description" && value.is_string();
            let fields = fields.iter().filter(|field| !is_text(field));
            Value::Object(
                fields.map(|(name, value)| (name.clone(), without_descriptions(value))).collect(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(without_descriptions).collect()),
        other => other.clone(),
    }
}

/// A wrong manifest would be noticed.
pub(crate) fn mistakes_are_noticed() -> Result<()> {
    let right = fs::read_to_string(path("cluster.yaml"))?;
    for (from, to, expected) in [
        ("instances: 3", "instances: three", "is not of type integer"),
        ("  instances: 3", "  instances: 3\n  replicas: 3", "there is no field replicas"),
        ("    size: 10Gi", "    sice: 10Gi", "there is no field sice"),
        ("audience: vault", "audiences: vault", "there is no field audiences"),
        ("          path: vault-token", "", "path is required"),
        ("      - pagevault\n    ext", "      pagevault: on\n    ext", "is not of type array"),
    ] {
        let wrong = right.replace(from, to);
        ensure!(wrong != right, "the example has no {from:?}");
        let Err(error) = check(&document(&wrong)?) else { bail!("accepted: {to}") };
        ensure!(error.to_string().contains(expected), "{error:#}");
    }
    Ok(())
}

fn path(name: &str) -> std::path::PathBuf {
    crate::root().join("docs/examples/cloudnativepg").join(name)
}

/// A manifest that its schema accepts.
fn manifest(name: &str) -> Result<Value> {
    let document = document(&fs::read_to_string(path(name))?)?;
    check(&document).with_context(|| name.to_owned())?;
    Ok(document)
}

fn document(text: &str) -> Result<Value> {
    let all = YamlLoader::load_from_str(text)?;
    ensure!(all.len() == 1, "{} documents", all.len());
    json(&all[0])
}

fn json(yaml: &Yaml) -> Result<Value> {
    Ok(match yaml {
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::Boolean(value) => Value::from(*value),
        Yaml::Array(items) => Value::Array(items.iter().map(json).collect::<Result<_>>()?),
        Yaml::Hash(fields) => {
            let field = |(name, value): (&Yaml, &Yaml)| {
                let name = name.as_str().context("a name that is no text")?.to_owned();
                Ok((name, json(value)?))
            };
            Value::Object(fields.iter().map(field).collect::<Result<_>>()?)
        }
        Yaml::Null => Value::Null,
        other => bail!("{other:?} is not used here"),
    })
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn check(manifest: &Value) -> Result<()> {
    let schemas: Value = serde_json::from_str(SCHEMAS)?;
    ensure!(manifest["apiVersion"] == "postgresql.cnpg.io/v1", "another version of the interface");
    let kind = manifest["kind"].as_str().context("no kind")?;
    let schema = &schemas[kind];
    let mut top = schema["top"].clone();
    let mut spec = schema["spec"].clone();
    spec["properties"] = schema["fields"].clone();
    top["properties"]["spec"] = spec;
    // The API server has a schema of its own for this.
    top["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = Value::from(true);
    fits(manifest, &top, kind)
}

/// Whether a value fits a structural schema, without fields that it does not have: the API server
/// would remove them, or refuse them (`fieldValidation: Strict`).
fn fits(value: &Value, schema: &Value, at: &str) -> Result<()> {
    if schema["x-kubernetes-int-or-string"] == true {
        ensure!(value.is_string() || value.is_i64(), "{at} is neither text nor a number");
        return Ok(());
    }
    let expected = schema["type"].as_str().with_context(|| format!("{at} has no type"))?;
    let is_it = match expected {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64(),
        "boolean" => value.is_boolean(),
        other => bail!("{at}: type {other}"),
    };
    ensure!(is_it, "{at} is not of type {expected}");
    if let Some(allowed) = schema["enum"].as_array() {
        ensure!(allowed.contains(value), "{at} is none of {allowed:?}");
    }
    let length = value.as_str().map_or(1, str::len) as u64;
    ensure!(schema["minLength"].as_u64().is_none_or(|least| length >= least), "{at} is too short");
    ensure!(schema["maxLength"].as_u64().is_none_or(|most| length <= most), "{at} is too long");
    if let (Some(least), Some(number)) = (schema["minimum"].as_i64(), value.as_i64()) {
        ensure!(number >= least, "{at} is less than {least}");
    }
    for (number, item) in items(value).enumerate() {
        fits(item, &schema["items"], &format!("{at}[{number}]"))?;
    }
    for required in items(&schema["required"]).filter(|_| value.is_object()) {
        let name = required.as_str().unwrap_or_default();
        ensure!(value.get(name).is_some(), "{at}.{name} is required");
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let at = format!("{at}.{name}");
        match (schema["properties"].get(name), &schema["additionalProperties"]) {
            (Some(known), _) => fits(field, known, &at)?,
            (None, more) if more.is_object() => fits(field, more, &at)?,
            (None, _) if schema["x-kubernetes-preserve-unknown-fields"] == true => {}
            _ => bail!("{at}: there is no field {name}"),
        }
    }
    Ok(())
}
