//! Checkpoint folders: good ones open as what they are, broken ones are refused by name.

mod broken;
mod config_json;
mod copy;
mod open;
mod values;
