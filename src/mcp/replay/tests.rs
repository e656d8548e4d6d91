use futures_util::FutureExt;
use serde_json::{Value, json};

use super::*;

/// An answer to a session call, with the result as it is on the wire.
fn answer(result: Value) -> ServerJsonRpcMessage {
    let message = json!({ "jsonrpc": "2.0", "id": 7, "result": result });
    serde_json::from_value(message).unwrap()
}

fn retained(message: &ServerJsonRpcMessage) -> Answer {
    let event = ServerSseMessage::from_message(message.clone());
    retain(&event, Some(&TextArena::default())).unwrap().0
}

/// Returns results that are more than a single small text.
fn other_results() -> Vec<Value> {
    let text = |text: &str| json!({ "type": "text", "text": text });
    vec![
        json!({ "content": [text("a"), text("b")], "isError": false }),
        json!({ "content": [text("a")], "isError": true }),
        json!({ "content": [text("a")] }),
        json!({ "content": [], "isError": false }),
        json!({ "content": [text("a")], "structuredContent": { "a": 1 }, "isError": false }),
        json!({ "content": [text("a")], "isError": false, "_meta": { "a": 1 } }),
        json!({ "content": [text("a")], "isError": false, "resultType": "complete" }),
        json!({
            "content": [{ "type": "text", "text": "a", "annotations": { "priority": 0.5 } }],
            "isError": false,
        }),
        json!({ "content": [text(&"x".repeat(MAX_ARENA_TEXT + 1))], "isError": false }),
    ]
}

#[test]
fn only_a_single_small_text_is_stored_in_the_arena() {
    let plain = json!({ "content": [{ "type": "text", "text": "a" }], "isError": false });
    assert!(matches!(
        retained(&answer(plain)).content,
        AnswerContent::Text(..)
    ));
    for result in other_results() {
        let retained_answer = retained(&answer(result.clone()));
        assert!(
            matches!(retained_answer.content, AnswerContent::Message(_)),
            "{result}"
        );
    }
}

#[test]
fn an_answer_is_restored_unchanged() {
    let plain = json!({ "content": [{ "type": "text", "text": "\u{e9}\n" }], "isError": false });
    for result in other_results().into_iter().chain([plain]) {
        let message = answer(result);
        let end = RetainedOutcome::Answered(retained(&message));
        let events = replay(Some(end), "0/0").collect::<Vec<_>>();
        let events = events.now_or_never().unwrap();
        let [_, answered] = events.as_slice() else {
            panic!("{} events", events.len());
        };
        let answered = serde_json::to_value(answered.message.as_deref()).unwrap();
        assert_eq!(answered, serde_json::to_value(&message).unwrap());
    }
}

/// After an event with an id, the TypeScript SDK 1.x resumes even if it received the error.
#[test]
fn an_error_is_replayed_alone() {
    let error = json!({ "code": -32602, "message": "no such document" });
    let message = json!({ "jsonrpc": "2.0", "id": 7, "error": error });
    let message: ServerJsonRpcMessage = serde_json::from_value(message).unwrap();
    let end = RetainedOutcome::Answered(retained(&message));
    let replayed = replay(Some(end), "0/0").collect::<Vec<_>>();
    let stored = ReplayedAnswer::new(stream::empty(), retained(&message), "0/0").into_stream();
    for events in [
        replayed.now_or_never(),
        stored.collect::<Vec<_>>().now_or_never(),
    ] {
        let events = events.unwrap();
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0].event_id, None);
        let message_of_event = serde_json::to_value(events[0].message.as_deref()).unwrap();
        assert_eq!(message_of_event, serde_json::to_value(&message).unwrap());
    }
}

#[test]
fn a_replay_ends_with_the_answer_although_the_store_waits_for_more() {
    let message = answer(json!({ "content": [] }));
    let replayed = [None, Some(Arc::new(message.clone()))].map(|message| {
        let mut event = ServerSseMessage::priming("later", DEFAULT_RETRY);
        event.message = message;
        event
    });
    let replayed = stream::iter(replayed).chain(stream::pending());
    let completed = ReplayedAnswer::new(replayed, retained(&message), "named");
    let events = completed.into_stream().collect::<Vec<_>>();
    let events = events.now_or_never().unwrap();
    assert_eq!(events.len(), 2, "{events:?}");
    let last = serde_json::to_value(events[1].message.as_deref()).unwrap();
    assert_eq!(last, serde_json::to_value(&message).unwrap());
}

/// Returns one answer for each place that can hold a text, with this text in it.
fn answers_with(text: &str) -> Vec<Value> {
    let with = |mut object: Value, key: &str, value: Value| {
        object[key] = value;
        object
    };
    let meta = json!({ "of.a/b": text });
    let plain = json!({ "type": "text", "text": "a" });
    let image = json!({ "type": "image", "data": "a", "mimeType": "a/b" });
    let audio = json!({ "type": "audio", "data": "a", "mimeType": "a/b" });
    let link = json!({ "type": "resource_link", "uri": "a:b", "name": "a" });
    let contents = json!({ "uri": "a:b", "text": "a" });
    let resource = json!({ "type": "resource", "resource": contents });
    let mut blocks = vec![
        with(plain.clone(), "text", json!(text)),
        with(image.clone(), "data", json!(text)),
        with(image.clone(), "mimeType", json!(text)),
        with(audio.clone(), "data", json!(text)),
        with(link.clone(), "description", json!(text)),
    ];
    for (key, value) in [
        ("text", json!(text)),
        ("uri", json!(text)),
        ("_meta", meta.clone()),
    ] {
        let changed = with(contents.clone(), key, value);
        blocks.push(with(resource.clone(), "resource", changed));
    }
    let blob = json!({ "uri": "a:b", "blob": text });
    blocks.push(with(resource.clone(), "resource", blob));
    for block in [plain.clone(), image, audio, link, resource] {
        blocks.push(with(block, "_meta", meta.clone()));
    }
    let with_block = blocks
        .into_iter()
        .map(|block| json!({ "content": [plain, block] }));
    let results = with_block.chain([
        json!({ "content": [], "structuredContent": { "a": text } }),
        json!({ "content": [], "structuredContent": text }),
        json!({ "content": [], "_meta": meta }),
        json!({ "content": [], "resultType": text }),
        json!({ "tools": [{ "name": text, "inputSchema": {} }] }),
        json!({ "unknown": text }),
    ]);
    let answers = results.map(|result| json!({ "id": 7, "result": result }));
    let others = [
        json!({ "id": text, "result": { "content": [plain] } }),
        json!({ "id": 7, "error": { "code": 1, "message": text } }),
        json!({ "id": 7, "error": { "code": 1, "message": "a", "data": text } }),
    ];
    let answers = answers.chain(others);
    answers
        .map(|answer| with(answer, "jsonrpc", json!("2.0")))
        .collect()
}

#[test]
fn the_size_of_an_answer_counts_all_its_parts() {
    const LARGE: usize = 5_000_000;
    let shown = answers_with("…");
    for (answer, shown) in answers_with(&"x".repeat(LARGE)).into_iter().zip(shown) {
        let message = serde_json::from_value(answer).unwrap();
        let event = ServerSseMessage::from_message(message);
        let (_, size) = retain(&event, Some(&TextArena::default())).unwrap();
        assert!(
            (LARGE..LARGE + 10_000).contains(&size),
            "{size} for {shown}"
        );
    }
}

#[test]
fn text_annotations_count_towards_the_size() {
    let annotations = json!({ "audience": vec!["user"; 100_000] });
    let block = json!({ "type": "text", "text": "a", "annotations": annotations });
    let event = ServerSseMessage::from_message(answer(json!({ "content": [block] })));
    let (_, size) = retain(&event, None).unwrap();
    assert!(size >= 100_000 * "\"user\"".len(), "{size}");
}

#[test]
fn blocks_without_text_count_towards_the_size() {
    let block = json!({ "type": "text", "text": "" });
    let message = answer(json!({ "content": vec![block; 10_000] }));
    let event = ServerSseMessage::from_message(message);
    let (_, size) = retain(&event, None).unwrap();
    assert!(size >= 10_000 * size_of::<ContentBlock>(), "{size}");
}
