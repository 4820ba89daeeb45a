use super::*;

#[test]
fn only_this_machine_is_loopback() {
    for host in ["localhost", "localhost:18888", "127.0.0.1:1", "[::1]", "[::1]:80", "LOCALHOST:1"] {
        assert!(is_loopback(host), "{host}");
    }
    for host in ["evil.example", "localhost.evil.example:18888", "127.0.0.1.evil:1", "", "localhost:1@evil", "::1"] {
        assert!(!is_loopback(host), "{host}");
    }
}

#[test]
fn pages_from_elsewhere_are_refused() {
    let local = |pairs: &[(header::HeaderName, &str)]| {
        let headers = pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        is_local(&headers)
    };
    assert!(local(&[(header::HOST, "localhost:1")]));
    assert!(local(&[(header::HOST, "127.0.0.1:1"), (header::ORIGIN, "http://127.0.0.1:1")]));
    for origin in ["http://localhost:2", "http://127.0.0.1:1"] {
        assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, origin)]), "another program's page: {origin}");
    }
    assert!(!local(&[]));
    assert!(!local(&[(header::HOST, "evil.example:1")]));
    assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "http://evil.example")]));
    assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "null")]));
}
