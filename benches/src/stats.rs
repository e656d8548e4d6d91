//! Quantiles and random numbers.

/// Measured values, sorted.
#[derive(Debug, Clone, Default)]
pub struct Sample(Vec<f64>);

/// Reproducible random numbers (splitmix64), so that every set-up gets the same clients.
#[derive(Debug, Clone)]
pub struct Dice(pub u64);

// === impl Sample ===

impl Sample {
    /// Returns the smallest value that this share of the values does not exceed. `NaN` for an empty sample.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil() as usize;
        let index = rank.clamp(1, self.0.len().max(1)) - 1;
        self.0.get(index).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        match self.0.len() % 2 {
            0 if middle > 0 => (self.0[middle - 1] + self.0[middle]) / 2.0,
            _ => self.quantile(0.5),
        }
    }

    pub fn min(&self) -> f64 {
        self.quantile(0.0)
    }

    pub fn max(&self) -> f64 {
        self.quantile(1.0)
    }

    /// Returns the median and the quartiles, for display.
    pub fn spread(&self) -> String {
        let [least, most] = [0.25, 0.75].map(|share| self.quantile(share));
        format!("{:.3} ({least:.3}–{most:.3})", self.median())
    }
}

impl FromIterator<f64> for Sample {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }
}

// === impl Dice ===

impl Dice {
    /// Returns a number from 0 up to but not including 1.
    pub fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_measured_value_but_a_median_may_lie_between_two() {
        let hundred: Sample = (1..=100).rev().map(f64::from).collect();
        let quantiles = [0.0, 0.5, 0.99, 0.991, 1.0].map(|share| hundred.quantile(share));
        assert_eq!(quantiles, [1.0, 50.0, 99.0, 100.0, 100.0]);
        assert_eq!(hundred.median(), 50.5);
        assert!(Sample::default().quantile(0.5).is_nan() && Sample::default().median().is_nan());
    }

    #[test]
    fn dice_cover_the_range() {
        let mut dice = Dice(3);
        let shares: Sample = (0..1_000).map(|_| dice.share()).collect();
        assert!(shares.min() >= 0.0 && shares.max() < 1.0);
        assert!((0.45..0.55).contains(&shares.median()));
    }
}
