//! Two in turn, A B B A and so on, so that what drifts favours neither side.

use anyhow::Result;

use crate::stats::Sample;

/// So many pairs of runs, of side 0 and of side 1.
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

/// Side 1 to side 0.
pub fn ratios(pairs: &[[f64; 2]]) -> Sample {
    pairs.iter().map(|[bare, own]| own / bare).collect()
}
