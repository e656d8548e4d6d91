use super::*;

/// Returns the directory at a URL.
fn directory_at(url: &str) -> Result<RedisDirectory, DirectoryError> {
    RedisDirectory::new(&RedisAddress::new(url.to_owned()))
}

#[cfg(unix)]
mod real;
#[cfg(unix)]
mod server;

#[test]
fn keys_are_made_of_hashes_and_numbers() {
    let (session, incarnation) = (SessionHash::of("secret"), Incarnation::random());
    assert_eq!(
        session_key(session),
        "mcp:s:2bb80d537b1da3e38bd30361aa855686"
    );
    assert_eq!(
        answer_key(session, incarnation, CallNumber::new(7)),
        format!("mcp:a:{session}:{incarnation}:7")
    );
}

#[test]
fn the_run_id_of_a_backend_is_read_from_its_info() {
    let info = "# Server\r\nredis_version:7.0.15\r\nrun_id:0123abcd\r\ntcp_port:6379\r\n";
    assert_eq!(parse_run(info).unwrap(), BackendRunId::new("0123abcd"));
    for info in ["", "# Server\r\n", "run_id:\r\n", "xrun_id:1"] {
        assert_eq!(
            parse_run(info).unwrap_err().to_string(),
            "the directory contains a value not written by any instance: INFO does not include a run_id"
        );
    }
}

/// The backend's clock has been set back by 2 s. B renewed its lease 500 ms before that, and A 1.5 s before. No heartbeat has arrived
/// since.
#[test]
fn a_lease_too_far_ahead_of_the_clock_counts_as_lapsed_now() {
    let [a, b] = [(); 2].map(|()| Incarnation::random());
    let lease = |incarnation: Incarnation, renewed| {
        let text = format!("{renewed} 1 run settled 10.0.0.7:9000");
        (incarnation.to_string(), text)
    };
    let fields = vec![lease(a, 100_500), lease(b, 101_500)];
    let leases = parse_leases(fields, (100, 0), "run_id:run").unwrap();
    assert!(leases.get(a).is_some(), "control");
    assert!(leases.get(b).is_none(), "control");
    assert_eq!(leases.turned_away, Some(Duration::ZERO));
}

#[tokio::test]
async fn an_address_that_cannot_be_read_is_an_error_and_a_password_is_not_shown() {
    for url in [
        "",
        "cache:6379",
        "http://cache",
        "redis://user:secret@cache:port",
    ] {
        let error = directory_at(url).unwrap_err();
        assert!(
            !format!("{error} {error:?}").contains("secret"),
            "{error:?}"
        );
    }
    let directory = directory_at("redis://user:secret@cache:6379").unwrap();
    assert!(!format!("{directory:?}").contains("secret"));
}

#[tokio::test]
async fn an_unsupported_url_is_an_error_that_names_the_reason() {
    let error_of = |address: &RedisAddress| {
        let error = RedisDirectory::new(address).unwrap_err();
        error.to_string()
    };
    let tls = RedisAddress::new("rediss://cache:6379".to_owned());
    let unverified = RedisAddress::new("rediss://cache:6379/#insecure".to_owned());
    if cfg!(feature = "tls") {
        assert!(RedisDirectory::new(&tls).is_ok());
        assert!(error_of(&unverified).contains("#insecure"));
    } else {
        assert!(error_of(&tls).contains("`tls` feature"));
    }
    let sentinel = |url: &str, sentinel: &str| RedisAddress {
        sentinels: vec![sentinel.to_owned()],
        ..RedisAddress::new(url.to_owned())
    };
    let usable = sentinel("redis://:secret@primary", "redis://10.0.0.1:26379");
    assert!(RedisDirectory::new(&usable).is_ok());
    error_of(&sentinel("redis://primary", "10.0.0.1:26379"));
    let no_name = sentinel("unix:///tmp/redis.sock", "redis://10.0.0.1:26379");
    assert!(error_of(&no_name).contains("name"));
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_root_certificate_must_be_valid_and_applicable() {
    let error_of = |url: &str, pem: &[u8]| {
        let address = RedisAddress {
            root_certificate: Some(pem.to_owned()),
            ..RedisAddress::new(url.to_owned())
        };
        let error = RedisDirectory::new(&address).unwrap_err();
        error.to_string()
    };
    assert!(error_of("rediss://cache", b"a file of another kind").contains("PEM"));
    assert!(error_of("redis://cache", b"").contains("rediss://"));
}
