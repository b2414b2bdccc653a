//! Objects that are not nodes: the secrets of encrypted images, and throttle groups.

use super::arguments::{Arguments, is_well_formed, optional_text, text};
use super::{Monitor, Result};
use crate::error::QmpError;
use crate::secret::Description;
use isobath_disk::encryption::{Secret, Secrets, on_thread};
use isobath_storage::Host;
use serde_json::Value;
use std::sync::Arc;

/// The longest ID of an object.
const LONGEST: usize = 255;

impl<H: Host + Clone> Monitor<H> {
    pub(super) async fn object_add(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        if !is_well_formed(id, LONGEST) {
            return Err(QmpError::new("Parameter 'id' expects an identifier"));
        }
        let is_secret = self.secrets.borrow().contains_key(id);
        if is_secret || self.throttle_objects.borrow().contains_key(id) {
            return Err(QmpError::new(format_args!(
                "attempt to add duplicate property '{id}' to object (type 'container')"
            )));
        }
        match text(arguments, "qom-type") {
            "throttle-group" => self.add_throttle_group(arguments),
            _ => self.add_secret(arguments).await,
        }
    }

    async fn add_secret(&self, arguments: &Arguments) -> Result<()> {
        let pairs = arguments.iter().filter(|(name, _)| *name != "qom-type");
        let pairs = pairs.filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
        let description = Description::of(pairs).map_err(QmpError::new)?;
        let id = description.id.clone();
        // Reading may block: a descriptor may have no data yet.
        let secret = on_thread(move || description.load()).await;
        let secret = secret.ok_or_else(|| QmpError::new("cannot read the secret"))?;
        let secret = Arc::new(secret.map_err(QmpError::new)?);
        self.secrets.borrow_mut().insert(id, secret);
        Ok(())
    }

    /// Forgets a secret, or a throttle group without members; disks that were opened with a secret stay open.
    pub(super) fn object_del(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        if let Some(removed) = self.remove_throttle_group(id) {
            return removed;
        }
        let removed = self.secrets.borrow_mut().remove(id);
        removed.map(drop).ok_or_else(|| QmpError::new(format_args!("object '{id}' not found")))
    }

    fn secret(&self, id: &str) -> Result<Arc<Secret>> {
        let secret = self.secrets.borrow().get(id).cloned();
        secret.ok_or_else(|| QmpError::new(format_args!("No secret with id '{id}'")))
    }

    /// The server's secrets; if a node's `key-secret` or `encrypt` names one, it replaces that of the active image.
    /// Names of backing files may give the IDs of those that there are now.
    pub(super) fn secrets_for(&self, node: &Arguments) -> Result<Secrets> {
        let encryption = node.get("encrypt").and_then(Value::as_object);
        let named = optional_text(encryption.unwrap_or(node), "key-secret");
        let known = self.secrets.borrow().clone();
        let mut secrets = self.opening.options.secrets.clone();
        secrets = secrets.with_ids(move |id| known.get(id).cloned().map(Ok));
        if let Some(id) = named {
            secrets.set(0, self.secret(id)?);
        }
        Ok(secrets)
    }
}
