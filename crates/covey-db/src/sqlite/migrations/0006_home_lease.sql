-- A driver that ends gives back whatever home its session holds.
CREATE INDEX home_lease ON home(org, lease_session) WHERE lease_session IS NOT NULL;
