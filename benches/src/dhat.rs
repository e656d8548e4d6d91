//! Where allocations are made, according to valgrind's `dhat`.

use std::{collections::BTreeMap, fs};

use anyhow::Result;
use serde::Deserialize;

use crate::{
    attribution::{Owner, owner, root},
    case::Case,
    valgrind::{self, Allocator, in_scratch},
};

/// Allocations made at one location in the crate.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Allocated {
    pub count: f64,
    pub bytes: f64,
}

/// Source locations, such as `src/service.rs:88`.
pub type Places = BTreeMap<String, Allocated>;

#[derive(Deserialize)]
struct Profile {
    pps: Vec<Point>,
    ftbl: Vec<String>,
}

#[derive(Deserialize)]
struct Point {
    /// Total bytes.
    tb: u64,
    /// Total blocks.
    tbk: u64,
    /// The stack, innermost frame first, as indices into the frame table.
    fs: Vec<usize>,
}

/// Returns the crate's allocations per call, taken as the difference between two runs.
///
/// Omits locations with at most 0.0005 allocations per call.
pub fn places(case: Case) -> Result<Places> {
    let (few, many) = (100, 1_100);
    let before = run(case, few)?;
    let mut places = run(case, many)?;
    for (place, allocated) in &mut places {
        let before = before.get(place).copied().unwrap_or_default();
        let each = |after: f64, before: f64| (after - before) / f64::from(many - few);
        allocated.count = each(allocated.count, before.count);
        allocated.bytes = each(allocated.bytes, before.bytes);
    }
    places.retain(|_, allocated| allocated.count > 0.0005);
    Ok(places)
}

fn run(case: Case, times: u32) -> Result<Places> {
    let profile = in_scratch(|folder| {
        let file = folder.join("profile.json");
        let out = format!("--dhat-out-file={}", file.display());
        let options = ["--num-callers=60", "--fullpath-after=", &out];
        let arguments = format!("ask {times} {case}");
        valgrind::run("dhat", &options, Allocator::Glibc, &arguments)?;
        Ok(serde_json::from_slice(&fs::read(&file)?)?)
    })?;
    Ok(by_place(&profile, &root()?))
}

/// Attributes each allocation to the innermost frame outside a container. Omits all but the crate's.
fn by_place(profile: &Profile, root: &str) -> Places {
    let mut places = Places::new();
    for point in &profile.pps {
        let frames = point.fs.iter().map(|frame| &profile.ftbl[*frame]);
        let owners = frames.map(|frame| owner(place(frame), root));
        let mut owners = owners.skip_while(|owner| *owner == Owner::Container);
        if let Some(Owner::Layer(place)) = owners.next() {
            let allocated = places.entry(format!("src/{place}")).or_default();
            allocated.count += point.tbk as f64;
            allocated.bytes += point.tb as f64;
        }
    }
    places
}

/// Returns a frame's location: `path:line` or `in library`.
///
/// A frame is `0xADDRESS: function (path:line)`, or `0xADDRESS: function (in library)`.
fn place(frame: &str) -> &str {
    let place = frame.rsplit_once('(').map_or("in ", |(_, place)| place);
    place.trim_end_matches(')')
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "/home/me/layer/src/";

    #[test]
    fn an_allocation_belongs_to_the_containers_caller() {
        let registry = "(/home/me/.cargo/registry/src/index-1";
        let table = [
            "0x1: malloc (in /usr/libexec/valgrind/preload.so)".to_owned(),
            "0x2: alloc (/rustc/5980/library/alloc/src/alloc.rs:95)".to_owned(),
            format!("0x3: f {registry}/http-body-util-0.1.3/src/full.rs:1)"),
            "0x4: call<a, b> (/home/me/layer/src/service.rs:94)".to_owned(),
            format!("0x5: call {registry}/rmcp-3.9.0/src/tower.rs:7)"),
        ];
        let point = |tb, tbk, fs: [usize; 5]| Point {
            tb,
            tbk,
            fs: fs.to_vec(),
        };
        let pps = vec![
            point(64, 2, [0, 1, 2, 3, 4]),
            point(999, 9, [0, 1, 2, 4, 3]),
        ];
        let ftbl = table.to_vec();
        let (place, count, bytes) = ("src/service.rs:94".to_owned(), 2.0, 64.0);
        let expected = Places::from([(place, Allocated { count, bytes })]);
        assert_eq!(by_place(&Profile { pps, ftbl }, ROOT), expected);
    }
}
