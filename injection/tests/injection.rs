//! Some injected errors. The long form is `make inject`.
