//! Rules about one file.

const BANNED_STEMS: [&str; 9] =
    ["util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "stuff"];
const BANNED_TYPE_ENDINGS: [&str; 4] = ["Manager", "Helper", "Util", "Utils"];
const SQL_HOME: &str = "crates/covey-db/";

/// Spelled in pieces, so that this file does not contain what it looks for.
const SQL_CRATES: [&str; 3] =
    [concat!("rus", "qlite"), concat!("tokio_", "postgres"), concat!("deadpool_", "postgres")];
const MARKS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const BUILD_MACHINE_PATHS: [&str; 4] =
    [concat!("/ro", "ot/.cargo"), concat!("/ro", "ot/work"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
const HOME_DIRS: &str = concat!("/ho", "me/");
/// Names that may follow `/home/`: the sandbox's own, and what stands for "any person" in documents.
const HOMES_OF_NOBODY: [&str; 4] = ["agent", "user", "you", "$"];

type Rule = fn(&str, &str) -> Option<String>;

const RULES: [Rule; 8] = [
    file_name,
    type_names,
    opens_with_its_purpose,
    marks_have_an_issue,
    sql_stays_at_home,
    no_path_of_a_build_machine,
    no_registry_address,
    tests_assert,
];

/// Every rule that the file breaks, as `path: what`.
pub(super) fn faults(path: &str, text: &str) -> Vec<String> {
    RULES.iter().filter_map(|rule| rule(path, text)).map(|what| format!("{path}: {what}")).collect()
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn file_name(path: &str, _: &str) -> Option<String> {
    let name = path.rsplit('/').next()?;
    if name == "mod.rs" {
        return Some("name the file after its module instead of `mod.rs`".to_owned());
    }
    let stem = name.split('.').next()?;
    let source = [".rs", ".py", ".ts", ".mts", ".js", ".mjs", ".sh"].iter().any(|end| name.ends_with(end));
    (source && BANNED_STEMS.contains(&stem)).then(|| format!("`{stem}` says nothing about what is inside"))
}

fn type_names(path: &str, text: &str) -> Option<String> {
    if !is_rust(path) {
        return None;
    }
    let mut words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        if !["struct", "enum", "trait"].contains(&word) {
            continue;
        }
        let name = words.next()?;
        if BANNED_TYPE_ENDINGS.iter().any(|end| name.ends_with(end)) {
            return Some(format!("`{name}` is a job title; name the type after what it is"));
        }
    }
    None
}

fn opens_with_its_purpose(path: &str, text: &str) -> Option<String> {
    (is_rust(path) && !text.starts_with("//! "))
        .then(|| "does not open with `//!` and its purpose".to_owned())
}

fn marks_have_an_issue(path: &str, text: &str) -> Option<String> {
    let code = [".rs", ".py", ".ts", ".mts", ".sh", ".toml"].iter().any(|end| path.ends_with(end));
    if !code {
        return None;
    }
    text.lines().enumerate().find_map(|(index, line)| {
        let comment = line.split_once("//").or_else(|| line.split_once('#'))?.1;
        let mark = MARKS
            .iter()
            .find(|mark| comment.split(|c: char| !c.is_ascii_uppercase()).any(|word| word == **mark))?;
        let rest = comment.split_once(mark)?.1;
        (!rest.starts_with("(#")).then(|| format!("line {}: write `{mark}(#issue)`", index + 1))
    })
}

fn sql_stays_at_home(path: &str, text: &str) -> Option<String> {
    let outside = is_rust(path) && !path.starts_with(SQL_HOME);
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    // As a path, not in a list of names: a check may name what it forbids.
    let names_one = |line: &str| SQL_CRATES.iter().any(|name| line.contains(&format!("{name}::")));
    let used = || code.clone().any(names_one);
    (outside && used()).then(|| format!("SQL belongs in {SQL_HOME} (I1)"))
}

fn no_path_of_a_build_machine(_: &str, text: &str) -> Option<String> {
    for (index, line) in text.lines().enumerate() {
        if let Some(path) = BUILD_MACHINE_PATHS.iter().find(|path| holds_path(line, path)) {
            return Some(format!("line {}: `{path}…` exists only on one machine", index + 1));
        }
        let foreign = line.match_indices(HOME_DIRS).any(|(at, _)| {
            let rest = &line[at + HOME_DIRS.len()..];
            let starts = line[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
            // A single letter is a placeholder.
            let named = rest.chars().take_while(char::is_ascii_lowercase).count() > 1;
            starts && named && !HOMES_OF_NOBODY.iter().any(|name| rest.starts_with(name))
        });
        if foreign {
            return Some(format!("line {}: a person's home directory", index + 1));
        }
    }
    None
}

/// Whether `path` stands in `line` as the beginning of an absolute path, not inside a longer one.
fn holds_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        line[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && !"_-.~}/".contains(c))
    })
}

fn no_registry_address(path: &str, text: &str) -> Option<String> {
    let name = path.rsplit('/').next()?;
    if name == "package-lock.json" && text.contains("\"resolved\"") {
        return Some(
            "a download address is recorded; `npm install --omit-lockfile-registry-resolved`".to_owned(),
        );
    }
    let indexed = name.starts_with("requirements") && (text.contains("index-url") || text.contains("://"));
    indexed.then(|| "names a package index".to_owned())
}

fn tests_assert(path: &str, text: &str) -> Option<String> {
    if !is_rust(path) {
        return None;
    }
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("\n    #[test]\n") {
        let body = after.split("\n    }\n").next()?;
        let name = body.split_once("fn ").and_then(|(_, tail)| tail.split('(').next()).unwrap_or("?");
        // A property over any input asserts by not panicking.
        let is_property = !body.contains(&format!("fn {name}()"));
        let asserts = ["assert", "panic!", "unwrap_err", "check", "expect", "matches!", "prop_", "golden"];
        if !is_property && !asserts.iter().any(|word| body.contains(word)) {
            return Some(format!("the test `{name}` asserts nothing"));
        }
        rest = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(path: &str, text: &str) -> String {
        faults(path, text).join("; ")
    }

    #[test]
    fn names_that_say_nothing_are_refused() {
        assert!(broken("crates/x/src/a/mod.rs", "//! X.\n").contains("mod.rs"));
        assert!(broken("crates/x/src/utils.rs", "//! X.\n").contains("says nothing"));
        assert!(
            broken("crates/x/src/a.rs", &format!("//! X.\npub {} HomeManager;\n", "struct"))
                .contains("job title")
        );
        assert_eq!(broken("crates/x/src/a.rs", "//! X.\npub struct Home;\n"), "");
    }

    #[test]
    fn a_file_without_a_purpose_is_refused() {
        assert!(broken("crates/x/src/a.rs", "use std::fs;\n").contains("purpose"));
    }

    #[test]
    fn marks_need_an_issue_number() {
        let mark = MARKS[0];
        assert!(broken("a.rs", &format!("//! X.\n// {mark}: later\n")).contains("line 2"));
        assert_eq!(broken("a.rs", &format!("//! X.\n// {mark}(#7): later\n")), "");
    }

    #[test]
    fn sql_outside_the_database_module_is_refused() {
        for name in SQL_CRATES {
            let text = format!("//! X.\nuse {name}::Connection;\n");
            assert!(broken("crates/covey-server/src/http/agents.rs", &text).contains("I1"));
            assert_eq!(broken("crates/covey-db/src/sqlite/agents.rs", &text), "");
        }
    }

    #[test]
    fn paths_of_build_machines_and_people_are_refused() {
        for path in [format!("{}main/x", BUILD_MACHINE_PATHS[2]), format!("{HOME_DIRS}alice/x")] {
            assert!(!broken("README.md", &format!("see {path}\n")).is_empty(), "{path}");
        }
        for path in ["/home/agent/x", "target/home/x", "$HOME/work/x", "/net/work/x"] {
            assert_eq!(broken("README.md", &format!("see {path}\n")), "", "{path}");
        }
    }

    #[test]
    fn lock_files_name_no_registry() {
        let lock = r#"{"packages":{"node_modules/a":{"resolved":"https://somewhere/a.tgz"}}}"#;
        assert!(broken("tests/sdk/typescript/package-lock.json", lock).contains("download address"));
        assert!(broken("requirements.txt", "--index-url https://x\n").contains("index"));
        assert_eq!(broken("requirements.txt", "anthropic==1.0.0\n"), "");
    }

    #[test]
    fn a_test_that_asserts_nothing_is_refused() {
        let test = |body: &str| {
            format!("//! X.\nmod tests {{\n    #[test]\n    fn works() {{\n        {body}\n    }}\n}}\n")
        };
        assert!(broken("a.rs", &test("run();")).contains("`works` asserts nothing"));
        assert_eq!(broken("a.rs", &test("assert!(run());")), "");
    }
}
