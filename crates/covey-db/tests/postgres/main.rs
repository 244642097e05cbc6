//! The contract on a real PostgreSQL, and what is PostgreSQL's own: lost connections, several servers, migrations.
//!
//! `cargo xtask test --stage postgres` starts the server and says in `COVEY_TEST_POSTGRES` where it is and how to get in
//! as its superuser.

#[cfg(test)]
mod commits;
#[cfg(test)]
mod leases;
#[cfg(test)]
mod opening;
#[cfg(test)]
mod place;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod servers;
#[cfg(test)]
#[path = "../contract/suite.rs"]
mod suite;
#[cfg(test)]
mod tls;

#[cfg(test)]
mod tests {
    use crate::place::Place;
    use crate::suite::{self, World};

    async fn fresh() -> World {
        let place = Place::fresh().await;
        World::new(place.connect().await.into(), place.connect().await.into()).await
    }

    suite::whole_contract!(fresh().await);
}
