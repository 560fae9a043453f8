"""A prepared call of a user, as operators name it: by a number, since they take tensors and
constants only. Whoever may need it later, as an autograd graph does, holds it."""

from __future__ import annotations

from mesh_attention.choose.pack import Layer, Pack
from mesh_attention.plan.language.plan import Plan
from mesh_attention.runtime.session.caches import PlanSource, WeakRegistry
from mesh_attention.runtime.session.prepared_call import PreparedCall
from mesh_attention.runtime.session.session import User


class UserCall:
    """`name`: of the object in `OBJECT_CALLS`, where the user is one; `latest` and `batch`: what
    that says of its latest call when it is this one."""

    def __init__(
        self,
        user: User,
        call: PreparedCall,
        name: str = "0",
        latest: PlanSource | None = None,
        batch: tuple[Plan, Pack, Layer] | None = None,
    ) -> None:
        self.user, self.call, self.name = user, call, name
        self.latest, self.batch = latest, batch
        self.number = USER_CALLS.add(self)


USER_CALLS: WeakRegistry[UserCall] = WeakRegistry("the prepared call of this number is gone")
