//! Every error that a careful user can reach: SQLSTATE, message, DETAIL, HINT.
