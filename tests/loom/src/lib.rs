//! The life of a session in every order in which threads may use and close it.
//!
//! The word is the crate's own file; loom takes the place of its atomics. Each model lets two or three threads do what
//! they do in the crate, and says what must hold whoever comes first.

#![cfg(loom)]

#[path = "../../../src/mcp/life.rs"]
mod life;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use loom::{sync::Arc, thread};

    use super::life::Life;

    const TIME: Duration = Duration::from_millis(100);

    /// Runs what `others` do, each in a thread, and what is left to this one.
    fn at_once<T>(
        life: &Arc<Life>,
        others: Vec<fn(&Life) -> bool>,
        here: impl FnOnce(&Life) -> T,
    ) -> (Vec<bool>, T) {
        let threads: Vec<_> = others
            .into_iter()
            .map(|other| {
                let life = life.clone();
                thread::spawn(move || other(&life))
            })
            .collect();
        let here = here(life);
        (
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect(),
            here,
        )
    }

    #[test]
    fn of_a_request_and_a_close_one_comes_first_and_both_know_which() {
        loom::model(|| {
            let life = Arc::new(Life::new());
            let (touched, left) = at_once(&life, vec![|life| life.touch(100)], |life| {
                life.close_if_idle(100, TIME)
            });
            assert_eq!(touched[0], left.is_some());
            assert_eq!(life.is_closed(), left.is_none());
            // Who came first has all of its time.
            assert!(left.is_none_or(|left| left == TIME));
        });
    }

    #[test]
    fn a_request_that_uses_its_session_is_never_closed_upon() {
        // As the session manager does: touched, then in use until it is answered.
        fn request(life: &Life) -> bool {
            if !life.touch(100) {
                return false;
            }
            life.begin();
            let open = !life.is_closed();
            life.end(101);
            assert!(open, "it was touched, and closed within its time");
            true
        }
        loom::model(|| {
            let life = Arc::new(Life::new());
            let (requested, left) =
                at_once(&life, vec![request], |life| life.close_if_idle(100, TIME));
            assert_eq!(requested[0], left.is_some());
            // Its time starts with its last use.
            let left = life.left(150, TIME);
            assert_eq!(left, requested[0].then_some(Duration::from_millis(51)));
        });
    }

    #[test]
    fn a_session_that_is_in_use_is_not_closed_whoever_else_comes_and_goes() {
        fn comes_and_goes(life: &Life) -> bool {
            life.begin();
            life.end(900);
            true
        }
        loom::model(|| {
            let life = Arc::new(Life::new());
            life.begin();
            let (_, left) = at_once(&life, vec![comes_and_goes], |life| {
                life.close_if_idle(1_000, TIME)
            });
            assert_eq!(left, Some(TIME));
            life.end(1_000);
            assert_eq!(life.left(1_000, TIME), Some(TIME), "no use is left over");
            assert_eq!(life.close_if_idle(1_100, TIME), None);
        });
    }

    #[test]
    fn of_two_times_the_later_stays() {
        loom::model(|| {
            let life = Arc::new(Life::new());
            let (touched, _) = at_once(&life, vec![|life| life.touch(60)], |life| {
                life.begin();
                life.end(50);
            });
            assert_eq!(touched, [true]);
            assert_eq!(life.left(100, TIME), Some(Duration::from_millis(60)));
        });
    }

    #[test]
    fn of_two_who_close_it_both_find_it_closed_and_it_stays_so() {
        loom::model(|| {
            let life = Arc::new(Life::new());
            let others: Vec<fn(&Life) -> bool> =
                vec![|life| life.close_if_idle(100, TIME).is_none(), |life| {
                    // A use of somebody who has not asked, as a stream of it that goes.
                    life.begin();
                    life.end(100);
                    life.is_closed()
                }];
            let (_, left) = at_once(&life, others, |life| life.close_if_idle(100, TIME));
            if left.is_none() {
                assert!(life.is_closed());
                assert!(!life.touch(200));
                assert_eq!(life.left(1_000, TIME), None);
            }
        });
    }
}
