//! Medians, and ratios of paired rounds with a confidence interval.
//!
//! In each round, all contenders do the same work one after the other. Disturbances that last
//! longer than a round therefore affect all of them equally, and only the ratio within a round is
//! meaningful. The estimate is that of Hodges and Lehmann on the logarithms of these ratios (the
//! median of all their pairwise means). The interval is that of Wilcoxon's signed-rank test, exact
//! for the number of rounds. Neither assumes a normal distribution, and one outlier changes neither
//! much. Fewer than 6 rounds give no 95 % interval: the result is then the range of the ratios,
//! with its actual confidence.

use serde::{Deserialize, Serialize};

/// Confidence of intervals.
const CONFIDENCE: f64 = 0.95;

/// A ratio with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Estimate {
    /// Hodges-Lehmann estimate of the ratio.
    pub(crate) ratio: f64,
    /// Lower end of the interval.
    pub(crate) low: f64,
    /// Upper end of the interval.
    pub(crate) high: f64,
    /// Probability that the interval covers the ratio, 0 to 1.
    pub(crate) confidence: f64,
    /// Number of rounds.
    pub(crate) rounds: usize,
}

impl Estimate {
    /// How far the interval reaches from the ratio, as a share of the ratio.
    pub(crate) fn reach(&self) -> f64 {
        (self.high / self.ratio - 1.0).max(1.0 - self.low / self.ratio)
    }
}

/// The median; `None` without values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some((lower + upper) / 2.0)
}

/// The ratio of the second to the first value of each pair. Pairs without a ratio are left out.
pub(crate) fn paired_ratio(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<Estimate> {
    let logs: Vec<f64> = pairs
        .into_iter()
        .filter(|(base, value)| *base > 0.0 && *value > 0.0)
        .map(|(base, value)| (value / base).ln())
        .collect();
    let rounds = logs.len();
    let mut walsh: Vec<f64> = (0..rounds)
        .flat_map(|i| (i..rounds).map(move |j| (i, j)))
        .map(|(i, j)| f64::midpoint(logs[i], logs[j]))
        .collect();
    walsh.sort_by(f64::total_cmp);
    let ratio = median(walsh.iter().copied())?.exp();
    let (cut, confidence) = signed_rank_interval(rounds);
    Some(Estimate {
        ratio,
        low: walsh[cut].exp(),
        high: walsh[walsh.len() - 1 - cut].exp(),
        confidence,
        rounds,
    })
}

/// The number of ordered pairwise means to leave out at each end, and the resulting confidence.
fn signed_rank_interval(rounds: usize) -> (usize, f64) {
    let most = rounds * (rounds + 1) / 2;
    // The number of the 2^n patterns of signs in which the positive ranks add up to each sum.
    let mut ways = vec![0.0; most + 1];
    ways[0] = 1.0;
    for rank in 1..=rounds {
        for sum in (rank..=most).rev() {
            ways[sum] += ways[sum - rank];
        }
    }
    let patterns = 2.0_f64.powi(i32::try_from(rounds).unwrap_or(i32::MAX));
    // After leaving out `cut` at each end, the interval misses if the statistic is at most `cut`,
    // at either end.
    let confidence = |cut: usize| 1.0 - 2.0 * ways[..=cut].iter().sum::<f64>() / patterns;
    let cut = (0..most / 2).take_while(|cut| confidence(*cut) >= CONFIDENCE).last().unwrap_or(0);
    (cut, confidence(cut).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    /// Critical values from published tables of the signed-rank statistic (two-sided, 5 %): 0 for 6
    /// rounds, 2 for 7, 3 for 8, 5 for 9, 8 for 10; the interval leaves out as many at each end.
    #[test]
    fn intervals_use_the_tables_of_wilcoxon() {
        for (rounds, cut) in [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8)] {
            assert_eq!(signed_rank_interval(rounds).0, cut, "{rounds} rounds");
            assert!(signed_rank_interval(rounds).1 >= 0.95);
        }
        assert_eq!(signed_rank_interval(5), (0, 1.0 - 2.0 / 32.0));
        assert_eq!(signed_rank_interval(1), (0, 0.0));
    }

    #[test]
    fn one_outlier_changes_little() {
        let steady = [(100.0, 98.0); 8];
        let mut spoiled = steady;
        spoiled[3] = (100.0, 40.0);
        let found = paired_ratio(spoiled).expect("a ratio");
        assert!((found.ratio - 0.98).abs() < 0.001, "{found:?}");
        assert!(found.low > 0.6 && found.low < 0.98, "{found:?}");
        assert!((found.high - 0.98).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn drift_that_affects_all_equally_cancels_out() {
        let pairs = [(100.0, 90.0), (50.0, 45.0), (200.0, 180.0)];
        let found = paired_ratio(pairs).expect("a ratio");
        assert!((found.ratio - 0.9).abs() < 1e-9 && found.high - found.low < 1e-9, "{found:?}");
        assert_eq!(found.rounds, 3);
    }

    #[test]
    fn pairs_without_a_ratio_are_left_out() {
        assert_eq!(paired_ratio([(0.0, 1.0), (1.0, 0.0)]), None);
        assert_eq!(paired_ratio([(0.0, 1.0), (2.0, 1.0)]).map(|found| found.rounds), Some(1));
    }
}
