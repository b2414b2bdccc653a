//! Why jobs fail.

use isobath_image::DiskError;
use std::sync::Arc;

/// Why a job did not succeed. The disk reads as before. An image to which the job copied keeps what it got: a stream's
/// overlay shows the same with it, but a commit's base and a mirror's target do not, each by itself.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The disk, or the image that the job copies to.
    #[error(transparent)]
    Disk(Arc<DiskError>),
    /// The future that runs the job was dropped before it had ended.
    #[error("it was abandoned before it ended")]
    Abandoned,
    /// It was cancelled.
    #[error("it was cancelled")]
    Cancelled,
}

impl JobError {
    /// The Linux error number that describes the failure best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Disk(error) => error.errno(),
            Self::Abandoned | Self::Cancelled => libc::ECANCELED,
        }
    }
}

impl From<DiskError> for JobError {
    fn from(error: DiskError) -> Self {
        Self::Disk(Arc::new(error))
    }
}
