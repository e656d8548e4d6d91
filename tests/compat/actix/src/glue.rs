use std::{convert::Infallible, error::Error};

use actix_web::{HttpRequest, HttpResponse, http::StatusCode, web::Bytes};
use http_body_util::{BodyExt as _, Full};
use tower::{Service, ServiceExt as _};

/// Passes a request to `service`, which has the layer around it. The layer must probe: `layer.keep_alive(…)`.
pub async fn pass<S, B>(service: S, request: HttpRequest, body: Bytes) -> HttpResponse
where
    S: Service<http::Request<Full<Bytes>>, Response = http::Response<B>, Error = Infallible>,
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error>> + 'static> + 'static,
{
    let mut passed = http::Request::builder()
        .method(request.method().as_str())
        .uri(request.uri().to_string());
    for (name, value) in request.headers() {
        passed = passed.header(name.as_str(), value.as_bytes());
    }
    let passed = passed.body(Full::new(body)).expect("actix has read it");
    let Ok(response) = service.oneshot(passed).await;
    let (head, body) = response.into_parts();
    let status = StatusCode::from_u16(head.status.as_u16()).expect("a status");
    let mut response = HttpResponse::build(status);
    for (name, value) in &head.headers {
        response.append_header((name.as_str(), value.as_bytes()));
    }
    response.streaming(body.into_data_stream())
}
