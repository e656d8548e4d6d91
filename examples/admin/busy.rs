//! Clients whose calls the page shows. They call slow tools, and some of them disconnect.

use std::{error::Error, io, time::Duration};

use serde_json::{Value, json};
use tokio::time::sleep;

use self::raw::{Client, Connection};

#[path = "../shared/raw.rs"]
mod raw;

pub(super) async fn run(addr: &str) -> Result<(), Box<dyn Error>> {
    let addr = addr.parse()?;
    let client = Client::connect(addr).await?;
    let _report = call(&client, json!(1), "report").await?;
    let _upload = call(&client, json!(2), "upload").await?;
    let second_client = Client::connect(addr).await?;
    // Send markup instead of an id and a name, as any client could.
    let script = "<script>alert(1)</script>";
    let _markup = call(&second_client, json!("\"><b>7"), script).await?;
    loop {
        // This client disconnects and never resumes. The call waits 20 s for it.
        call(&second_client, json!(8), "deploy").await?.hang_up();
        sleep(Duration::from_secs(60)).await;
    }
}

/// Calls a tool and waits until the server has accepted the call.
async fn call(client: &Client, id: Value, tool: &str) -> io::Result<Connection> {
    client
        .call(id, tool, json!({}))
        .await?
        .expect_accepted()
        .await
}
