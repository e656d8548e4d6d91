//! Runs two sides alternately, A B B A and so on, so that drift affects both equally.

use anyhow::Result;

use crate::stats::Sample;

/// Runs `count` pairs, each of side 0 and side 1.
pub async fn alternate<T>(
    count: usize,
    mut run: impl AsyncFnMut(usize) -> Result<T>,
) -> Result<Vec<[T; 2]>> {
    let mut pairs = Vec::new();
    for pair in 0..count {
        let first = pair % 2;
        let (one, other) = (run(first).await?, run(1 - first).await?);
        pairs.push(if first == 0 {
            [one, other]
        } else {
            [other, one]
        });
    }
    Ok(pairs)
}

/// The ratio of side 1 to side 0 in each pair.
pub fn ratios(pairs: &[[f64; 2]]) -> Sample {
    pairs.iter().map(|[first, second]| second / first).collect()
}
