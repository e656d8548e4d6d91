//! Runs two sides alternately, A B B A and so on, so that drift affects both equally.

use anyhow::Result;

use crate::stats::Sample;

/// Runs `count` pairs. Side 0's result is first in each pair.
pub async fn alternate<T>(
    count: usize,
    mut run: impl AsyncFnMut(usize) -> Result<T>,
) -> Result<Vec<[T; 2]>> {
    let mut pairs = Vec::new();
    for pair in 0..count {
        let first = pair % 2;
        let (earlier, later) = (run(first).await?, run(1 - first).await?);
        pairs.push(if first == 0 {
            [earlier, later]
        } else {
            [later, earlier]
        });
    }
    Ok(pairs)
}

/// Returns each pair's ratio of side 1 to side 0.
pub fn ratios(pairs: &[[f64; 2]]) -> Sample {
    pairs.iter().map(|[first, second]| second / first).collect()
}
