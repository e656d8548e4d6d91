use super::*;

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
fn the_start_of_an_engine_is_read_from_what_it_says_of_itself() {
    let info = "# Server\r\nredis_version:7.0.15\r\nrun_id:0123abcd\r\ntcp_port:6379\r\n";
    assert_eq!(read_run(info).unwrap(), EngineRun::new("0123abcd"));
    for info in ["", "# Server\r\n", "run_id:\r\n", "xrun_id:1"] {
        assert_eq!(
            read_run(info).unwrap_err().to_string(),
            "the directory holds what no instance wrote: INFO names no run_id"
        );
    }
}

#[tokio::test]
async fn an_address_that_cannot_be_read_is_an_error_and_a_password_is_not_shown() {
    for url in [
        "",
        "cache:6379",
        "http://cache",
        "redis://user:secret@cache:port",
    ] {
        let error = RedisDirectory::new(url).unwrap_err();
        assert!(
            !format!("{error} {error:?}").contains("secret"),
            "{error:?}"
        );
    }
    let directory = RedisDirectory::new("redis://user:secret@cache:6379").unwrap();
    assert!(!format!("{directory:?}").contains("secret"));
}
