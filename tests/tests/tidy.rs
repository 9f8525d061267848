//! tidy: what a reader may rely on in every file of the tree, checked mechanically.
//!
//! A rule stands here only if breaking it once has cost somebody time, or would. Each test prints every place that breaks its rule.

use std::path::{Path, PathBuf};

const LINES_MAX: usize = 600;

struct File {
    path: PathBuf,
    /// Path from the workspace root, with `/`.
    name: String,
    text: String,
}

impl File {
    fn has_extension(&self, extensions: &[&str]) -> bool {
        self.path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted))
    }
    /// The part of a Rust file that ships: everything before its tests.
    fn shipped(&self) -> &str {
        self.text.split("#[cfg(test)]").next().unwrap_or_default()
    }
    /// Not a test: neither in a folder of tests nor a module of tests in a file of its own.
    fn is_shipped_rust(&self) -> bool {
        self.has_extension(&["rs"])
            && !self.name.starts_with("tests/")
            && !self.name.contains("/tests/")
            && !self.name.ends_with("tests.rs")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests crate lies in the workspace").to_path_buf()
}

/// Every text file of the tree that people write.
fn files() -> Vec<File> {
    let root = root();
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            if path.is_dir() {
                if name != "target" && name != ".git" && name != "models" && name != "__pycache__" {
                    folders.push(path);
                }
                continue;
            }
            let written = ["rs", "cu", "cuh", "toml", "md", "py", "sh"];
            let by_extension = path.extension().is_some_and(|e| written.iter().any(|w| e == *w));
            if by_extension || path.ends_with(".ci/run") {
                let text = std::fs::read_to_string(&path).unwrap();
                let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
                files.push(File { path, name, text });
            }
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(files.len() > 50, "the walk found the workspace");
    files
}

/// `name:line: text` of each line that breaks a rule.
fn lines_where(files: &[File], breaks: impl Fn(&File, &str) -> bool) -> Vec<String> {
    files
        .iter()
        .flat_map(|file| file.text.lines().enumerate().map(move |(at, line)| (file, at, line)))
        .filter(|(file, _, line)| breaks(file, line))
        .map(|(file, at, line)| format!("{}:{}: {}", file.name, at + 1, line.trim()))
        .collect()
}

fn assert_none(rule: &str, places: Vec<String>) {
    assert!(places.is_empty(), "{rule}:\n{}", places.join("\n"));
}

/// Whether `word` stands in `line` with no identifier character on either side.
fn has_word(line: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(is_word)
            && !line[at + word.len()..].chars().next().is_some_and(is_word)
    })
}

#[test]
fn no_file_is_too_long_to_read_in_one_sitting() {
    let long = files()
        .into_iter()
        .filter(|file| file.has_extension(&["rs", "cu", "cuh", "py", "sh"]))
        .filter(|file| file.text.lines().count() > LINES_MAX)
        .map(|file| format!("{}: {} lines", file.name, file.text.lines().count()))
        .collect();
    assert_none("files past 600 lines hide a second noun", long);
}

#[test]
fn nothing_is_left_unfinished() {
    let marks: Vec<String> =
        ["to", "unimplemen", "db"].iter().zip(["do!", "ted!", "g!"]).map(|(a, b)| format!("{a}{b}(")).collect();
    let words: Vec<String> =
        ["TO", "FIX", "XX"].iter().zip(["DO", "ME", "X"]).map(|(a, b)| format!("{a}{b}")).collect();
    let places = lines_where(&files(), |file, line| {
        file.has_extension(&["rs", "cu", "cuh", "py", "sh"])
            && (marks.iter().any(|mark| line.contains(mark.as_str())) || words.iter().any(|word| has_word(line, word)))
    });
    assert_none("unfinished work", places);
}

#[test]
fn unsafe_code_stays_in_its_two_places() {
    let allowed = |file: &File| file.name.starts_with("graphs/src/cuda") || file.name.starts_with("tests/cabi/");
    let places = lines_where(&files(), |file, line| {
        let code = line.split("//").next().unwrap_or_default();
        file.has_extension(&["rs"]) && file.name != "tests/tests/tidy.rs" && !allowed(file) && has_word(code, "unsafe")
    });
    assert_none("unsafe code outside graphs/src/cuda and tests/cabi", places);
}

#[test]
fn crate_roots_forbid_unsafe_code() {
    let files = files();
    let forbids = |name: &str, attribute: &str| {
        let file = files.iter().find(|file| file.name == name).unwrap_or_else(|| panic!("{name} is missing"));
        assert!(file.text.contains(attribute), "{name} lacks {attribute}");
    };
    for krate in ["kernels", "runtime", "server", "probes"] {
        forbids(&format!("{krate}/src/lib.rs"), "#![forbid(unsafe_code)]");
    }
    forbids("graphs/src/lib.rs", "#![deny(unsafe_code)]");
    for binary in ["server/src/main.rs", "probes/src/main.rs"] {
        forbids(binary, "#![forbid(unsafe_code)]");
    }
}

#[test]
fn source_files_say_what_they_are() {
    let silent = files()
        .into_iter()
        .filter(|file| file.has_extension(&["rs"]) && !file.text.starts_with("//!"))
        .map(|file| file.name)
        .collect();
    assert_none("files that do not open with //!", silent);
}

#[test]
fn shipped_code_names_why_an_unwrap_holds() {
    let mut places = Vec::new();
    for file in files().iter().filter(|file| file.is_shipped_rust()) {
        let shipped = file.shipped();
        for (at, line) in shipped.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if code.contains(".unwrap()") {
                places.push(format!("{}:{}: {}", file.name, at + 1, line.trim()));
            }
        }
    }
    assert_none("unwrap in shipped code: say in an expect why it holds", places);
}

#[test]
fn ignored_tests_carry_a_reason() {
    let bare = format!("#[{}]", "ignore");
    assert_none("ignored without a reason", lines_where(&files(), |_, line| line.contains(&bare)));
}

#[test]
fn no_path_of_one_machine_is_written_down() {
    let roots = ["home", "root", "work", "mnt", "Users", "workspace"];
    let places = lines_where(&files(), |file, line| {
        let starts_path = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-}~".contains(c));
        file.name != "tests/tests/tidy.rs"
            && roots.iter().any(|root| line.match_indices(&format!("/{root}/")).any(|(at, _)| starts_path(at)))
    });
    assert_none("paths of one machine", places);
}

#[test]
fn arrows_between_crates_point_one_way() {
    let allowed: [(&str, &[&str]); 6] = [
        ("kernels", &[]),
        ("graphs", &["kernels"]),
        ("runtime", &["graphs", "kernels"]),
        ("server", &["runtime", "graphs", "kernels"]),
        ("probes", &["server", "runtime", "graphs", "kernels"]),
        ("tests", &["probes", "server", "runtime", "graphs", "kernels"]),
    ];
    for (krate, may_use) in allowed {
        let manifest = std::fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        for line in manifest.lines().filter(|line| line.starts_with("slotgraph-") && line.contains("workspace")) {
            let used = line.trim_start_matches("slotgraph-").split(['.', ' ', '=']).next().unwrap();
            assert!(may_use.contains(&used), "{krate} must not use {used}");
        }
    }
}

/// The command lines of README's shell blocks, continuation lines joined, comments cut.
fn readme_commands() -> Vec<String> {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let mut commands = Vec::new();
    let mut inside = false;
    let mut pending = String::new();
    for line in readme.lines() {
        if line.starts_with("```") {
            inside = !inside && line.trim_end() == "```sh";
            continue;
        }
        if !inside {
            continue;
        }
        let line = line.split(" #").next().unwrap_or_default().trim();
        match line.strip_suffix('\\') {
            Some(part) => pending += part,
            None => {
                let command = std::mem::take(&mut pending) + line;
                if !command.is_empty() && !command.starts_with('#') {
                    commands.push(command);
                }
            }
        }
    }
    commands
}

/// An op is one file in Rust and one in CUDA; `rows` is what ops share.
#[test]
fn every_op_has_a_kernel() {
    let file = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let ops: Vec<String> = std::fs::read_dir(root().join("kernels/src/ops"))
        .unwrap()
        .flatten()
        .map(|entry| file(entry).trim_end_matches(".rs").to_string())
        .filter(|name| !["mod", "rows"].contains(&name.as_str()))
        .collect();
    assert!(ops.len() > 10, "the walk found the ops");
    let missing =
        ops.iter().map(|op| format!("kernels/cuda/{op}.cu")).filter(|path| !root().join(path).exists()).collect();
    assert_none("ops without a kernel", missing);
}

fn single_spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_readme_command_is_run_by_ci() {
    let run = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    let commands = readme_commands();
    assert!(
        commands.iter().any(|command| command.starts_with("cargo run --release -- serve")),
        "README starts the server"
    );
    assert!(commands.iter().any(|command| command == "cargo test --release"), "README names the test command");
    let flat = single_spaced(&run.replace("\\\n", " "));
    let missing = commands.into_iter().filter(|command| !flat.contains(&single_spaced(command))).collect();
    assert_none("README commands that .ci/run does not run", missing);
}

#[test]
fn the_readme_and_the_architecture_exist_and_point_at_real_files() {
    for document in ["README.md", "ARCHITECTURE.md"] {
        let text = std::fs::read_to_string(root().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"));
        let mut missing = Vec::new();
        for word in text.split(['`', '(', ')']) {
            let is_path = word.contains('/')
                && !word.contains([' ', '<', '*', '{', '$', '=', ':', '\n'])
                && ["kernels/", "graphs/", "runtime/", "server/", "probes/", "tests/"]
                    .iter()
                    .any(|c| word.starts_with(c));
            if is_path && !root().join(word).exists() {
                missing.push(format!("{document}: {word}"));
            }
        }
        assert_none("paths in documents that do not exist", missing);
    }
    assert!(std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap().contains("**Invariant:**"));
}
