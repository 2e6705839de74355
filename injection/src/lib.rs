//! Errors of the operating system, injected below a server.
//!
//! ```text
//!   Injector    the library under a server, and the orders for it
//!   Scenario    what is set up, and the statement during which calls fail
//!   Injection   which call fails, and how
//!   judge       what must be true of a server after any of them
//!   Place       where calls are made; of many, some fail
//!   campaign    finds the calls of a scenario, and has each of them fail
//! ```

pub mod campaign;
pub mod catalogue;
pub mod injector;
mod judge;
mod messages;
pub mod places;
mod server;

#[path = "../injector/src/order.rs"]
mod order;
