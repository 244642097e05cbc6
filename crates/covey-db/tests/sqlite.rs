//! The contract on SQLite.

#[cfg(test)]
#[path = "contract/suite.rs"]
mod suite;

#[cfg(test)]
mod tests {
    use covey_db::Db;

    use super::suite::{self, World};

    /// Keeps the directory for as long as the world is used.
    struct Kept {
        world: World,
        _dir: tempfile::TempDir,
    }

    impl std::ops::Deref for Kept {
        type Target = World;

        fn deref(&self) -> &World {
            &self.world
        }
    }

    async fn fresh() -> Kept {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        Kept { world: World::new(db.clone(), db).await, _dir: dir }
    }

    suite::whole_contract!(fresh().await);

    #[tokio::test]
    async fn a_second_covey_on_the_same_file_is_refused_in_words() {
        let kept = fresh().await;
        let refused = Db::open(&kept._dir.path().join("covey.db")).unwrap_err().to_string();
        assert!(refused.contains("in use"), "{refused}");
    }

    #[tokio::test]
    async fn what_was_acknowledged_is_there_after_reopening() {
        let Kept { world, _dir: dir } = fresh().await;
        world.say(vec![suite::message("kept")]).await.unwrap();
        let (org, session) = (world.org, world.session.id);
        drop(world);
        // The writer thread ends on its own; the lock is released with the last handle.
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        assert_eq!(db.records(org, session, 0, 10).await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn the_secret_of_a_token_is_stored_nowhere() {
        let kept = fresh().await;
        let (_, secret) = kept.db.create_token(kept.org, "t").await.unwrap();
        let file = std::fs::read(kept._dir.path().join("covey.db-wal")).unwrap();
        assert!(!file.is_empty());
        assert!(!file.windows(secret.len()).any(|w| w == secret.as_bytes()));
    }
}
