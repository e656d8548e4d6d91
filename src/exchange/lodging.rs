//! A call, and the home in which it lives.

use std::sync::Arc;

use crate::{call::CallInfo, registry::Home};

pub(super) struct Lodging<T> {
    pub(super) info: CallInfo,
    pub(super) home: Arc<Home<T>>,
}
