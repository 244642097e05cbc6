//! Licence expressions, as far as package manifests use them: identifiers, `WITH`, `AND`, `OR`, parentheses,
//! and the old `/` for `OR`.

use std::iter::Peekable;

/// Whether somebody who accepts only `allowed` may use a work under `expression`.
pub(crate) fn is_allowed(expression: &str, allowed: &[String]) -> Result<bool, String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_ascii_whitespace().peekable();
    let verdict = either(&mut words, allowed)?;
    match words.next() {
        None => Ok(verdict),
        Some(word) => Err(format!("unexpected `{word}`")),
    }
}

fn either<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
    allowed: &[String],
) -> Result<bool, String> {
    let mut verdict = both(words, allowed)?;
    while words.next_if(|word| word.eq_ignore_ascii_case("OR")).is_some() {
        verdict |= both(words, allowed)?;
    }
    Ok(verdict)
}

fn both<'a>(words: &mut Peekable<impl Iterator<Item = &'a str>>, allowed: &[String]) -> Result<bool, String> {
    let mut verdict = single(words, allowed)?;
    while words.next_if(|word| word.eq_ignore_ascii_case("AND")).is_some() {
        verdict &= single(words, allowed)?;
    }
    Ok(verdict)
}

fn single<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
    allowed: &[String],
) -> Result<bool, String> {
    match words.next() {
        Some("(") => {
            let verdict = either(words, allowed)?;
            match words.next() {
                Some(")") => Ok(verdict),
                other => Err(format!("expected `)`, found {other:?}")),
            }
        }
        None | Some(")") => Err("a licence name is missing".to_owned()),
        Some(name) => {
            let full = match words.next_if(|word| word.eq_ignore_ascii_case("WITH")) {
                None => name.to_owned(),
                Some(_) => format!("{name} WITH {}", words.next().ok_or("an exception is missing")?),
            };
            Ok(allowed.contains(&full))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(expression: &str) -> Result<bool, String> {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(String::from);
        is_allowed(expression, &allowed)
    }

    #[test]
    fn one_acceptable_choice_is_enough_but_every_part_must_be_acceptable() {
        assert_eq!(verdict("MIT OR GPL-3.0-only"), Ok(true));
        assert_eq!(verdict("MIT/Apache-2.0"), Ok(true));
        assert_eq!(verdict("MIT AND GPL-3.0-only"), Ok(false));
        assert_eq!(verdict("(MIT OR GPL-2.0-only) AND Unicode-3.0"), Ok(false));
        assert_eq!(verdict("GPL-3.0-only OR (MIT AND Apache-2.0 WITH LLVM-exception)"), Ok(true));
        assert_eq!(verdict("LGPL-2.1-or-later"), Ok(false));
    }

    #[test]
    fn what_cannot_be_read_is_never_taken_as_allowed() {
        for text in ["", "MIT OR", "(MIT", "MIT)", "MIT MIT", "MIT WITH"] {
            assert!(verdict(text).is_err(), "{text}");
        }
    }
}
