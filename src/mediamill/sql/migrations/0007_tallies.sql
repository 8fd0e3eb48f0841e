-- What processes without a page of their own have done, for the metrics of the API.

CREATE TABLE tallies (
    name    text NOT NULL,                   -- of the metric
    what    text NOT NULL,
    outcome text NOT NULL,
    count   bigint NOT NULL,
    PRIMARY KEY (name, what, outcome)
);
