//! manifest: binds artifacts to the commit, model and tools that made them, and notices when any of it changed.
//!
//! **Invariant:** a manifest's own hash covers every field of it, so an edit of the manifest is as visible as one of a file.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::evidence::{COMMIT, Canary, Draft, Evidence, is_dirty, write_json};
use crate::regression::Regression;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Bind artifacts to their commit, model and tools; verify them; compare two reports.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files and folders to list; paths are kept relative to the manifest's folder.
    artifacts: Vec<PathBuf>,
    /// Where the manifest is written.
    #[arg(long, default_value = "artifact_manifest.json")]
    manifest: PathBuf,
    /// Model folder whose fingerprint is recorded.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Check an existing manifest instead: every file, the manifest itself, the commit of every report in it.
    #[arg(long, value_name = "MANIFEST", conflicts_with_all = ["artifacts", "compare"])]
    verify: Option<PathBuf>,
    /// With --verify: the commit that the manifest must name.
    #[arg(long, requires = "verify")]
    commit: Option<String>,
    /// Compare two evidence files: baseline, then current.
    #[arg(long, num_args = 2, value_names = ["BASELINE", "CURRENT"], conflicts_with = "artifacts")]
    compare: Vec<PathBuf>,
}

/// What the manifest file holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: u32,
    pub kind: String,
    pub commit: String,
    pub dirty: bool,
    pub rustc: String,
    pub version: String,
    /// SHA-256 over names and contents of the model's files; empty without --model.
    pub model_fingerprint: String,
    pub artifacts: Vec<Artifact>,
    /// One line per report among the artifacts.
    pub claims: Vec<ClaimRow>,
    /// SHA-256 over the artifacts' paths and hashes.
    pub artifact_bundle_sha256: String,
    /// SHA-256 over this object with this field empty.
    pub manifest_sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Artifact {
    pub path: String,
    pub bytes: u64,
    pub sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClaimRow {
    pub artifact: String,
    pub probe: String,
    pub verdict: String,
    pub commit: String,
    pub contract_hash: String,
    pub claim: Claim,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    if let [baseline, current] = args.compare.as_slice() {
        return compare(baseline, current);
    }
    match &args.verify {
        Some(manifest) => verify_probe(manifest, args.commit.as_deref()),
        None => make_probe(args),
    }
}

fn make_probe(args: &Args) -> Result<Outcome, ProbeError> {
    if args.artifacts.is_empty() {
        return Err(ProbeError::Usage("name the artifacts to list, or use --verify or --compare".into()));
    }
    let root = folder_of(&args.manifest);
    let model = args.model.as_deref().map(model_fingerprint).transpose()?.unwrap_or_default();
    let manifest = make(&root, &args.artifacts, model)?;
    write_json(&args.manifest, &manifest).map_err(|e| ProbeError::Failed(e.to_string()))?;
    let mut draft = draft();
    let commits: Vec<&str> =
        manifest.claims.iter().filter(|c| c.commit != manifest.commit).map(|c| c.artifact.as_str()).collect();
    draft.check("one_commit", commits.is_empty(), format!("made by another commit: {commits:?}"));
    draft.check("listed", !manifest.artifacts.is_empty(), format!("{} artifacts", manifest.artifacts.len()));
    draft.canary(canary(&root, &manifest)?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

fn verify_probe(path: &Path, commit: Option<&str>) -> Result<Outcome, ProbeError> {
    let text = std::fs::read(path).map_err(|e| ProbeError::Usage(format!("{}: {e}", path.display())))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|e| ProbeError::Usage(format!("{}: {e}", path.display())))?;
    let root = folder_of(path);
    let mut draft = draft();
    let mut problems = verify(&root, &manifest, |path| std::fs::read(path));
    if let Some(commit) = commit.filter(|commit| *commit != manifest.commit) {
        problems.push(format!("the manifest names commit {}, not {commit}", manifest.commit));
    }
    draft.check("unchanged", problems.is_empty(), summary_of(&problems, manifest.artifacts.len()));
    draft.detail("problems", &problems);
    draft.canary(canary(&root, &manifest)?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

fn compare(baseline: &Path, current: &Path) -> Result<Outcome, ProbeError> {
    let read = |path: &Path| Evidence::read(path).map_err(|e| ProbeError::Usage(e.to_string()));
    let (baseline, current) = (read(baseline)?, read(current)?);
    let regression = Regression::of(&baseline, &current);
    let worse: Vec<&str> = regression.worse().map(|row| row.metric.as_str()).collect();
    let mut draft = draft();
    draft.question = "did any number get worse, where a direction may be claimed at all?".into();
    draft.check("no_regression", worse.is_empty(), format!("worse: {worse:?}"));
    draft.detail("regression_summary", &regression);
    // The canary: the same pair with the baseline's numbers on another contract must lose every direction.
    let other = Evidence { contract_hash: format!("{}-other", current.contract_hash), ..current.clone() };
    let silent = Regression::of(&baseline, &other);
    draft.canary(Canary::planted("changed contract", !silent.no_directional_claim.is_empty()));
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

fn draft() -> Draft {
    let question = "are these artifacts the ones that this commit, model and toolchain made?";
    Draft::new("manifest", question, Claim::of(Label::MachineState))
}

fn summary_of(problems: &[String], artifacts: usize) -> String {
    match problems {
        [] => format!("{artifacts} artifacts unchanged"),
        [first, rest @ ..] => format!("{first} (and {} more)", rest.len()),
    }
}

/// Lists artifacts (folders recursively, in path order) as they are now.
pub fn make(root: &Path, paths: &[PathBuf], model_fingerprint: String) -> Result<Manifest, ProbeError> {
    let mut files = BTreeMap::new();
    for path in paths {
        collect(root, path, &mut files)?;
    }
    let mut claims = Vec::new();
    let mut artifacts = Vec::new();
    for (name, path) in files {
        let bytes = std::fs::read(&path).map_err(|e| ProbeError::Failed(format!("{}: {e}", path.display())))?;
        if let Ok(evidence) = serde_json::from_slice::<Evidence>(&bytes) {
            claims.push(ClaimRow {
                artifact: name.clone(),
                probe: evidence.probe,
                verdict: format!("{:?}", evidence.verdict).to_lowercase(),
                commit: evidence.commit,
                contract_hash: evidence.contract_hash,
                claim: evidence.claim,
            });
        }
        artifacts.push(Artifact { path: name, bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(&bytes)) });
    }
    let mut manifest = Manifest {
        schema: 1,
        kind: "slotgraph_artifact_manifest".into(),
        commit: COMMIT.into(),
        dirty: is_dirty(),
        rustc: env!("SLOTGRAPH_RUSTC").into(),
        version: env!("CARGO_PKG_VERSION").into(),
        model_fingerprint,
        artifact_bundle_sha256: bundle_hash(&artifacts),
        artifacts,
        claims,
        manifest_sha256: String::new(),
    };
    manifest.manifest_sha256 = self_hash(&manifest);
    Ok(manifest)
}

/// Everything that no longer agrees; `read` stands between the check and the disk so that a fault can be planted.
pub fn verify(root: &Path, manifest: &Manifest, read: impl Fn(&Path) -> std::io::Result<Vec<u8>>) -> Vec<String> {
    let mut problems = Vec::new();
    if self_hash(manifest) != manifest.manifest_sha256 {
        problems.push("the manifest itself was edited: its own hash differs".to_string());
    }
    if bundle_hash(&manifest.artifacts) != manifest.artifact_bundle_sha256 {
        problems.push("the list of artifacts was edited: the bundle hash differs".to_string());
    }
    for artifact in &manifest.artifacts {
        match read(&root.join(&artifact.path)) {
            Err(e) => problems.push(format!("{}: {e}", artifact.path)),
            Ok(bytes) if hex(&Sha256::digest(&bytes)) != artifact.sha256 => {
                let (want, got) = (artifact.bytes, bytes.len());
                problems.push(format!("{}: contents changed ({want} bytes listed, {got} found)", artifact.path));
            }
            Ok(_) => {}
        }
    }
    for claim in manifest.claims.iter().filter(|claim| claim.commit != manifest.commit) {
        problems.push(format!(
            "{}: made by commit {}, the manifest names {}",
            claim.artifact, claim.commit, manifest.commit
        ));
    }
    problems
}

/// Plants one flipped byte in the first artifact that has bytes and asks whether `verify` sees more than it saw before.
fn canary(root: &Path, manifest: &Manifest) -> Result<Canary, ProbeError> {
    let Some(victim) = manifest.artifacts.iter().find(|artifact| artifact.bytes > 0) else {
        return Ok(Canary::skipped("one flipped byte", "no artifact has a byte to flip"));
    };
    let before = verify(root, manifest, |path| std::fs::read(path)).len();
    let victim_path = root.join(&victim.path);
    let after = verify(root, manifest, |path| {
        let mut bytes = std::fs::read(path)?;
        if path == victim_path && !bytes.is_empty() {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        Ok(bytes)
    });
    let caught = after.len() > before || after.iter().any(|problem| problem.starts_with(&victim.path));
    Ok(Canary::planted("one flipped byte", caught))
}

fn collect(root: &Path, path: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), ProbeError> {
    let error = |e: std::io::Error| ProbeError::Usage(format!("{}: {e}", path.display()));
    if path.is_dir() {
        for entry in std::fs::read_dir(path).map_err(error)? {
            collect(root, &entry.map_err(error)?.path(), files)?;
        }
        return Ok(());
    }
    let full = path.canonicalize().map_err(error)?;
    let root = root.canonicalize().map_err(error)?;
    let name = full
        .strip_prefix(&root)
        .map_err(|_| ProbeError::Usage(format!("{} is not under the manifest's folder", path.display())))?;
    files.insert(name.to_string_lossy().into_owned(), full);
    Ok(())
}

/// SHA-256 over the names and contents of a model folder's files, in name order.
pub fn model_fingerprint(folder: &Path) -> Result<String, ProbeError> {
    let error = |path: &Path, e: std::io::Error| ProbeError::Usage(format!("{}: {e}", path.display()));
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|e| error(folder, e))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    names.sort();
    let mut sha = Sha256::new();
    for path in names {
        let mut file = std::fs::File::open(&path).map_err(|e| error(&path, e))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        sha.update((name.len() as u64).to_le_bytes());
        sha.update(name);
        sha.update(file.metadata().map_err(|e| error(&path, e))?.len().to_le_bytes());
        std::io::copy(&mut file, &mut sha).map_err(|e| error(&path, e))?;
    }
    Ok(hex(&sha.finalize()))
}

fn bundle_hash(artifacts: &[Artifact]) -> String {
    let mut sha = Sha256::new();
    for artifact in artifacts {
        sha.update(format!("{}\0{}\0{}\n", artifact.path, artifact.bytes, artifact.sha256));
    }
    hex(&sha.finalize())
}

fn self_hash(manifest: &Manifest) -> String {
    let bare = Manifest { manifest_sha256: String::new(), ..manifest.clone() };
    hex(&Sha256::digest(serde_json::to_vec(&bare).expect("a manifest is plain data")))
}

fn folder_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.txt"), "alpha").unwrap();
        std::fs::write(folder.path().join("b.txt"), "beta").unwrap();
        folder
    }

    fn made(folder: &Path) -> Manifest {
        make(folder, &[folder.join("a.txt"), folder.join("b.txt")], String::new()).unwrap()
    }

    #[test]
    fn one_flipped_byte_a_missing_file_and_a_changed_commit_are_each_seen() {
        let folder = folder();
        let manifest = made(folder.path());
        let read = |path: &Path| std::fs::read(path);
        assert_eq!(verify(folder.path(), &manifest, read), Vec::<String>::new());

        std::fs::write(folder.path().join("a.txt"), "alphb").unwrap();
        assert!(verify(folder.path(), &manifest, read)[0].contains("a.txt: contents changed"));
        std::fs::remove_file(folder.path().join("a.txt")).unwrap();
        assert!(verify(folder.path(), &manifest, read)[0].starts_with("a.txt: "));

        std::fs::write(folder.path().join("a.txt"), "alpha").unwrap();
        let other = Manifest { commit: "0".repeat(40), ..manifest.clone() };
        assert!(verify(folder.path(), &other, read)[0].contains("its own hash differs"));
        assert!(canary(folder.path(), &manifest).unwrap().caught);
    }

    #[test]
    fn a_report_of_another_commit_is_named() {
        let folder = folder();
        let mut draft = draft();
        draft.check("one", true, "");
        let evidence = Evidence { commit: "f".repeat(40), ..draft.finish() };
        evidence.write(&folder.path().join("e.json")).unwrap();
        let manifest = make(folder.path(), &[folder.path().to_path_buf()], String::new()).unwrap();
        assert_eq!(manifest.claims.len(), 1);
        let problems = verify(folder.path(), &manifest, |path| std::fs::read(path));
        assert!(problems.iter().any(|problem| problem.contains("made by commit ffff")));
    }

    #[test]
    fn the_fingerprint_follows_names_and_contents() {
        let folder = folder();
        let first = model_fingerprint(folder.path()).unwrap();
        std::fs::rename(folder.path().join("a.txt"), folder.path().join("c.txt")).unwrap();
        assert_ne!(first, model_fingerprint(folder.path()).unwrap());
    }
}
