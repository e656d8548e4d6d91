//! Who gives out session ids, as far as calls have shown it: for those who know an id and not its scope.

use crate::call::{Scope, SessionKey};

/// How many scopes are known by name, 64: far more than a server has session managers and MCP routes. With more,
/// whoever looks for a session by its id alone looks at all calls.
const MAX_SCOPES: usize = 64;

/// The longest path that is kept for it, in bytes: 256. Clients choose paths.
const MAX_PATH: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Scopes {
    known: Vec<Scope>,
    /// There are others.
    overflowed: bool,
}

// === impl Scopes ===

impl Scopes {
    /// A call of this scope came.
    pub(super) fn note(&mut self, scope: &Scope) {
        if self.overflowed || self.known.contains(scope) {
            return;
        }
        let is_short = scope.path().is_none_or(|path| path.len() <= MAX_PATH);
        if is_short && self.known.len() < MAX_SCOPES {
            self.known.push(scope.clone());
        } else {
            self.overflowed = true;
        }
    }

    /// The sessions that an id may name. `None` if there may be more.
    pub(super) fn sessions(&self, id: &str) -> Option<impl Iterator<Item = SessionKey>> {
        let session = move |scope: &Scope| SessionKey {
            scope: scope.clone(),
            id: id.into(),
        };
        (!self.overflowed).then(|| self.known.iter().map(session))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str) -> Scope {
        Scope::Path(path.into())
    }

    fn known(scopes: &Scopes) -> Option<usize> {
        scopes.sessions("s").map(Iterator::count)
    }

    #[test]
    fn an_id_may_name_a_session_of_every_scope_that_was_seen() {
        let mut scopes = Scopes::default();
        assert_eq!(known(&scopes), Some(0));
        for seen in ["/a", "/b", "/a"] {
            scopes.note(&path(seen));
        }
        let sessions = scopes.sessions("s").unwrap();
        let seen: Vec<_> = sessions.map(|session| session.scope).collect();
        assert_eq!(seen, [path("/a"), path("/b")]);
    }

    #[test]
    fn with_too_many_scopes_it_may_name_any() {
        let mut scopes = Scopes::default();
        for n in 0..MAX_SCOPES {
            scopes.note(&path(&n.to_string()));
        }
        assert_eq!(known(&scopes), Some(MAX_SCOPES));
        scopes.note(&path("/one/more"));
        assert_eq!(known(&scopes), None);
    }

    #[test]
    fn a_long_path_is_not_kept() {
        let mut scopes = Scopes::default();
        scopes.note(&path(&"x".repeat(MAX_PATH + 1)));
        assert_eq!(known(&scopes), None);
    }
}
