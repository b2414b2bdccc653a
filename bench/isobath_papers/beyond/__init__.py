"""What the papers do not measure: power loss below an image, sizes that no machine here holds, fleets."""

from . import fleet, power_loss, scale, together

TITLE = "Beyond the papers"
ABOUT = (
    "What a reader of the papers asks next: what is left of a guest's data when power is lost, how far it all scales,"
    " and what a provider's fleet of chains looks like. All of it is counted, or is right or wrong: nothing here"
    " depends on the speed of the machine."
)
# In the order of the page.
EXPERIMENTS = [power_loss, scale, together, fleet]
