//! Removes secrets from command lines, URLs and settings. Only this module decides what is a
//! secret.
//!
//! People pass passwords and tokens as arguments, as assignments in front of a command, and inside
//! URLs. More people read dumps, pages, logs and terminals than may know these secrets, so every
//! command line and URL goes through this module before it is stored, sent or shown. The name
//! decides: `--api-key`, `HF_TOKEN` and `db.password` contain secrets whatever their values look
//! like. A secret is replaced by [`HIDDEN`], so that a reader sees that something was removed.

use std::borrow::Cow;

/// Replaces a secret.
pub const HIDDEN: &str = "…";

/// A name with one of these suffixes is a secret, even without a separator: `PGPASSWORD`,
/// `accessToken`.
const ENDINGS: [&str; 12] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "credential",
    "credentials",
    "authorization",
];
/// A name whose last word is one of these is a secret.
const LAST_WORDS: [&str; 9] = ["key", "pass", "pwd", "auth", "cookie", "sig", "signature", "dsn", "bearer"];
/// Options with a user and a password in one argument, as in curl.
const USERS: [&str; 3] = ["-u", "--user", "--proxy-user"];
/// Tokens that are recognized by their prefix, under any name, and their minimum length.
const TOKENS: [(&str, usize); 12] = [
    ("hf_", 20),
    ("sk-", 20),
    ("ghp_", 20),
    ("gho_", 20),
    ("ghs_", 20),
    ("github_pat_", 20),
    ("glpat-", 16),
    ("xoxb-", 16),
    ("xoxp-", 16),
    ("AKIA", 20),
    ("eyJ", 30),
    ("wandb_v1_", 20),
];

/// A command line without secrets, with its arguments joined by spaces. Empty arguments are
/// omitted.
#[must_use]
pub fn command<'a>(arguments: impl IntoIterator<Item = &'a str>) -> String {
    let mut shown = String::new();
    let mut before = "";
    for argument in arguments.into_iter().filter(|argument| !argument.is_empty()) {
        if !shown.is_empty() {
            shown.push(' ');
        }
        match argument.split_once('=') {
            _ if is_option(before) && is_secret(before) && !argument.starts_with('-') => shown.push_str(HIDDEN),
            _ if USERS.contains(&before) => match argument.split_once(':') {
                Some((user, _)) => shown.extend([user, ":", HIDDEN]),
                None => shown.push_str(&text(argument)),
            },
            // The value may contain spaces.
            Some((name, _)) if name.chars().all(is_name) && is_secret(name) => shown.extend([name, "=", HIDDEN]),
            _ => shown.push_str(&text(argument)),
        }
        before = argument;
    }
    shown
}

/// The command line of a process without secrets, from the bytes of `/proc/PID/cmdline`.
#[must_use]
pub fn cmdline(bytes: &[u8]) -> String {
    let arguments: Vec<Cow<'_, str>> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    command(arguments.iter().map(|argument| &**argument))
}

/// The host of a URL. The rest may be a secret, as in the webhook URLs of chat services.
#[must_use]
pub fn host_of(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://").filter(|(scheme, _)| scheme.chars().all(is_name)) else {
        return HIDDEN.into();
    };
    let authority = &rest[..rest.find(ends_authority).unwrap_or(rest.len())];
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}/{HIDDEN}")
}

/// Any text without secrets: a script, a configuration, a URL, an error about one.
#[must_use]
pub fn text(text: &str) -> Cow<'_, str> {
    let mut shown = String::new();
    let mut rest = text;
    // Text at the start of `rest` is copied unless it is hidden.
    while let Some(start) = rest.find(is_name) {
        let word = &rest[start..];
        let word = &word[..word.find(|letter| !is_name(letter)).unwrap_or(word.len())];
        let behind = &rest[start + word.len()..];
        let (copied, hidden) = match secret_behind(word, behind) {
            Some((from, to)) => (start + word.len() + from, to - from),
            None if is_token(word) => (start, word.len()),
            None => (start + word.len(), 0),
        };
        shown.push_str(&rest[..copied]);
        if hidden > 0 {
            shown.push_str(HIDDEN);
        }
        rest = &rest[copied + hidden..];
    }
    shown.push_str(rest);
    if shown == text { Cow::Borrowed(text) } else { Cow::Owned(shown) }
}

/// Start and end of the secret after a word, relative to `behind`.
fn secret_behind(word: &str, behind: &str) -> Option<(usize, usize)> {
    if let Some(rest) = behind.strip_prefix("://") {
        let authority = &rest[..rest.find(ends_authority).unwrap_or(rest.len())];
        return authority.rfind('@').filter(|at| *at > 0).map(|at| (3, 3 + at));
    }
    if !is_secret(word) {
        return None;
    }
    // A key in JSON or in a dictionary is quoted, so quotes come before the separator.
    let unquoted = behind.trim_start_matches(['"', '\'', '\\', ']']);
    let spaced = unquoted.trim_start();
    let (value, ends): (&str, fn(char) -> bool) = match spaced.chars().next()? {
        '=' if !spaced.starts_with("==") => {
            (&spaced[1..], |letter| letter.is_whitespace() || "&;,\"'`)}]|<>".contains(letter))
        }
        // The value of a header contains spaces.
        ':' => (&spaced[1..], |letter| "\r\n,;}\"'`".contains(letter)),
        _ if is_option(word) && unquoted.starts_with(char::is_whitespace) && !spaced.starts_with('-') => {
            (spaced, |letter| letter.is_whitespace() || "&;\"'`)|<>".contains(letter))
        }
        _ => return None,
    };
    let value = value.trim_start_matches([' ', '\t', '\\']);
    let (value, ends) = match value.chars().next()? {
        quote @ ('"' | '\'' | '`') => (&value[1..], Ends::At(quote)),
        _ => (value, Ends::Where(ends)),
    };
    let length = match ends {
        Ends::At(quote) => value.find(quote),
        Ends::Where(ends) => value.find(ends),
    };
    let from = behind.len() - value.len();
    let length = length.unwrap_or(value.len());
    (length > 0).then_some((from, from + length))
}

enum Ends {
    At(char),
    Where(fn(char) -> bool),
}

fn is_option(word: &str) -> bool {
    word.starts_with('-') && !word.contains('=')
}

fn is_name(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '_' | '-' | '.')
}

fn ends_authority(letter: char) -> bool {
    letter.is_whitespace() || "/?#\"'`<>\\".contains(letter)
}

/// Whether a value of this name is a secret. The last word of the name decides: `max_tokens` and
/// `token_file` are not secrets.
fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    let last = name.rsplit(|letter: char| !letter.is_alphanumeric()).find(|word| !word.is_empty());
    last.is_some_and(|last| LAST_WORDS.contains(&last) || ENDINGS.iter().any(|ending| last.ends_with(ending)))
}

fn is_token(word: &str) -> bool {
    TOKENS.iter().any(|(begin, least)| word.len() >= *least && word.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(arguments: &[&str]) -> String {
        command(arguments.iter().copied())
    }

    #[test]
    fn a_command_shows_no_secret() {
        let script =
            "export API_KEY=s3cret; curl -H \"Authorization: Bearer s3cret x\" 'https://a:s3cret@h/x?token=s3cret&n=2'";
        for (arguments, expected) in [
            (&["python", "t.py", "--api-key=s3cret", "--lr=1"][..], "python t.py --api-key=… --lr=1"),
            (&["t", "--token", "s3cret", "--lr", "1"], "t --token … --lr 1"),
            (&["t", "--password=two s3cret words", "x"], "t --password=… x"),
            (&["t", "--password", "two s3cret words", "x"], "t --password … x"),
            (&["env", "HF_TOKEN=s3cret", "PGPASSWORD=s3cret", "python"], "env HF_TOKEN=… PGPASSWORD=… python"),
            (&["t", "wandb.api_key=s3cret", "-DaccessToken=s3cret"], "t wandb.api_key=… -DaccessToken=…"),
            (&["curl", "-u", "me:s3cret", "https://x/"], "curl -u me:… https://x/"),
            (&["t", "redis://:s3cret@host:1/0", "git+https://s3cret@h/r"], "t redis://…@host:1/0 git+https://…@h/r"),
            (&["t", "--env", "AWS_SECRET_ACCESS_KEY=s3cret"], "t --env AWS_SECRET_ACCESS_KEY=…"),
            (&["t", "-e=HF_TOKEN=s3cret"], "t -e=HF_TOKEN=…"),
            (&["t", "-H", "Authorization: Bearer s3cret"], "t -H Authorization: …"),
            (&["t", "{\"api_key\": \"s3cret, s3cret\", \"n\": 1}"], "t {\"api_key\": \"…\", \"n\": 1}"),
            (&["python", "-c", "os.environ['K_TOKEN'] = 's3cret'; f()"], "python -c os.environ['K_TOKEN'] = '…'; f()"),
            (&["ray::train --token s3cret --lr 1"], "ray::train --token … --lr 1"),
            (&["t", "hf_s3creTs3cretAAAAAAAA"], "t …"),
            (&["sh", "-c", script], "sh -c export API_KEY=…; curl -H \"Authorization: …\" 'https://…@h/x?token=…&n=2'"),
            (&["t", "--password", "--lr=1", "s3en"], "t --password --lr=1 s3en"),
        ] {
            let shown_text = shown(arguments);
            assert_eq!(shown_text, expected);
            assert!(!shown_text.contains("s3cre"), "{shown_text}");
        }
    }

    #[test]
    fn arguments_without_secrets_are_unchanged() {
        for arguments in [
            &["python", "-m", "torch.distributed.run", "--nproc-per-node=8", "train.py", "--max-tokens=4096"][..],
            &["t", "--tokenizer", "gpt2", "--num_tokens", "7", "--token-file=/run/token", "--password-file", "/x"],
            &["t", "--keys", "a", "monkey", "key", "tokens:", "7", "http://host:1/a@b?x=1", "a==b", "x:y"],
            &["sh", "-c", "if [ $a = b ]; then python train.py; fi"],
            &["t", "sk-short", "hf_model", "ein Wörtchen", "--"],
        ] {
            assert_eq!(shown(arguments), arguments.join(" "));
        }
        assert_eq!(cmdline(b"python\0\0t.py\0--token\0s3cret\0"), "python t.py --token …");
        assert_eq!(cmdline(b"\0"), "");
    }

    #[test]
    fn only_the_host_of_a_secret_url_is_shown() {
        assert_eq!(host_of("https://hooks.example/services/T0/B0/s3cret"), "https://hooks.example/…");
        assert_eq!(host_of("http://u:s3cret@127.0.0.1:9/h?s3cret"), "http://127.0.0.1:9/…");
        assert_eq!(host_of("s3cret"), "…");
        assert_eq!(text("https://u:s3cret@head:1: invalid"), "https://…@head:1: invalid");
        assert!(matches!(text("nothing to hide: 1"), Cow::Borrowed(_)));
    }

    #[test]
    fn any_text_is_accepted() {
        for odd in [
            "", "=", "--token", "--token=", "token:", "token: ", "token=\"", "a://@", "://", "a://b", "ä=ö", "token \\",
        ] {
            let _ = (text(odd), shown(&[odd, odd]), host_of(odd));
        }
    }
}
