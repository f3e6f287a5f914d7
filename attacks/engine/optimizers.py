"""Adam, and L-BFGS for many independent problems at once."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from fedgauge.client.components import Checked, Count

# points (N, D), their problems (N,) -> values (N,), gradients (N, D)
Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

SUFFICIENT, CURVATURE = 1e-4, 0.9  # the weak Wolfe conditions
TRIALS = 20  # of one line search
STRIDE = 10  # steps between two checks for a plateau


class Adam:
    """torch.optim.Adam by its function: the first object of its class would import torch's compiler, for over a second."""

    def __init__(self, variables: Iterable[Tensor]) -> None:
        self.variables = list(variables)
        self._means, self._squares = ([torch.zeros_like(t) for t in self.variables] for _ in range(2))
        self._steps = [torch.tensor(0.0) for _ in self.variables]

    @torch.no_grad()
    def step(self, slopes: Sequence[Tensor], rate: float) -> None:
        """Move the variables in place."""
        adam(
            self.variables, list(slopes), self._means, self._squares, [], self._steps,
            amsgrad=False, beta1=0.9, beta2=0.999, lr=rate, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip


@dataclass(frozen=True)
class lbfgs(Checked):
    """L-BFGS with a line search for each problem (Nocedal & Wright, ch. 7).

    The published gradient-matching codes have no line search and diverge in about one of four runs. Here each step
    satisfies the weak Wolfe conditions by bisection (Lewis & Overton, 2013), so the objective never rises.

    Args:
        history: remembered pairs of steps and gradient changes.
        plateau: a problem ends when ten steps lowered its value by less than this fraction.
        tolerance: a problem ends when its value is at most this.
        restart_above: a problem that ends above this value starts again from a new draw, with the rest of its budget.
    """

    history: Count = 20
    plateau: float = 1e-9
    tolerance: float = -math.inf
    restart_above: float = 0.0

    @property
    def state_per_variable(self) -> int:
        return 2 * self.history


@dataclass
class Descent:
    """The state of P problems."""

    x: Tensor  # (P, D)
    f: Tensor  # (P,) values
    g: Tensor  # (P, D) gradients
    spent: Tensor  # (P,) evaluations of each
    ended: Tensor  # (P,) whether it takes no more steps: at a minimum, at a plateau, or no step lowers it


def minimise(
    evaluate: Evaluate, start: Tensor, allowed: Tensor, settings: lbfgs, over: Callable[[], bool] = lambda: False
) -> Descent:
    """L-BFGS until each problem has spent its evaluations or ended; an ended problem costs nothing more.

    Args:
        start: (P, D).
        allowed: (P,) evaluations for each, at least 1.
        over: called between steps; True ends the search.
    """
    everyone = torch.arange(len(start), device=start.device)
    f, g = evaluate(start, everyone)
    lost = ~f.isfinite() | ~g.isfinite().all(1) | (g.abs().amax(1) == 0)
    descent = Descent(start.clone(), f, g, torch.ones_like(everyone), lost)
    memory = _LBFGSHistory(settings.history, start)
    marks, steps = descent.f.clone(), torch.zeros_like(everyone)
    while not over():
        live = (~descent.ended & (descent.spent < allowed)).nonzero().flatten()
        if len(live) == 0:
            break
        _step(evaluate, descent, live, memory, allowed)
        steps[live] += 1
        descent.ended[live] |= descent.f[live] <= settings.tolerance
        judged = live[steps[live] % STRIDE == 0]
        descent.ended[judged] |= (marks[judged] - descent.f[judged]) <= settings.plateau * marks[judged].abs()
        marks[judged] = descent.f[judged]
    return descent


def _step(evaluate: Evaluate, at: Descent, live: Tensor, memory: "_LBFGSHistory", allowed: Tensor) -> None:
    direction = memory.direction(at.g[live], live)
    slope = (direction * at.g[live]).sum(1)
    uphill = ~(slope < 0)
    if uphill.any():  # rounding has spoilt the curvature: forget it and use steepest descent
        memory.forget(live[uphill])
        direction[uphill] = -at.g[live[uphill]]
        slope = (direction * at.g[live]).sum(1)
    fresh = memory.empty(live)
    length = torch.where(fresh, (1 / at.g[live].abs().sum(1)).clamp(max=1.0), torch.ones_like(slope))
    origin_x, origin_g = at.x[live], at.g[live]
    moved = _search(evaluate, at, live, direction, slope, length, allowed)
    memory.remember(live[moved], at.x[live[moved]] - origin_x[moved], at.g[live[moved]] - origin_g[moved])
    stuck = live[~moved]
    at.ended[stuck] |= fresh[~moved]  # not even steepest descent helps
    memory.forget(stuck)


def _search(
    evaluate: Evaluate, at: Descent, live: Tensor, direction: Tensor, slope: Tensor, length: Tensor, allowed: Tensor
) -> Tensor:
    """Move each live problem along its direction to a point of sufficient decrease; returns which moved."""
    low, high = torch.zeros_like(length), torch.full_like(length, torch.inf)
    moved = torch.zeros(len(live), dtype=torch.bool, device=live.device)
    pending = torch.arange(len(live), device=live.device)
    origin_x, origin_f = at.x[live], at.f[live]
    for _ in range(TRIALS):
        rows = live[pending]
        trial = origin_x[pending] + length[pending, None] * direction[pending]
        f, g = evaluate(trial, rows)
        at.spent[rows] += 1
        lower = f <= origin_f[pending] + SUFFICIENT * length[pending] * slope[pending]
        lower &= g.isfinite().all(1)
        flat = (g * direction[pending]).sum(1) >= CURVATURE * slope[pending]
        better = lower & (f < at.f[rows])  # keep a decrease even if the curvature condition is never met
        at.x[rows[better]], at.f[rows[better]], at.g[rows[better]] = trial[better], f[better], g[better]
        moved[pending[better]] = True
        low[pending[lower]] = length[pending[lower]]
        high[pending[~lower]] = length[pending[~lower]]
        length[pending] = torch.where(high.isinf(), 2 * low, (low + high) / 2)[pending]
        pending = pending[~(lower & flat) & (at.spent[rows] < allowed[rows])]
        if len(pending) == 0:
            break
    return moved


class _LBFGSHistory:
    """Each problem's last steps s and gradient changes y in a ring buffer, with the products that the compact form needs."""

    def __init__(self, history: int, like: Tensor) -> None:
        count, size = like.shape
        self.s = like.new_zeros(count, history, size)
        self.y = torch.zeros_like(self.s)
        self.sy = like.new_zeros(count, history, history)  # s_i . y_j
        self.yy = torch.zeros_like(self.sy)
        self.length = torch.zeros(count, dtype=torch.int64, device=like.device)  # remembered pairs
        self.head = torch.zeros_like(self.length)  # where the next pair goes

    def empty(self, problems: Tensor) -> Tensor:
        return self.length[problems] == 0

    def forget(self, problems: Tensor) -> None:
        self.length[problems] = 0

    def remember(self, problems: Tensor, s: Tensor, y: Tensor) -> None:
        inner = (s * y).sum(1)
        useful = inner > 1e-10 * y.square().sum(1).clamp_min(1e-30)
        rows, s, y = problems[useful], s[useful], y[useful]
        if len(rows) == 0:
            return
        place = self.head[rows]
        self.s[rows, place], self.y[rows, place] = s, y
        ours, theirs = self._of(self.s, rows), self._of(self.y, rows)
        self.sy[rows, :, place] = torch.bmm(ours, y[:, :, None])[:, :, 0]
        self.sy[rows, place] = torch.bmm(theirs, s[:, :, None])[:, :, 0]
        self.yy[rows, :, place] = self.yy[rows, place] = torch.bmm(theirs, y[:, :, None])[:, :, 0]
        self.head[rows] = (place + 1) % self.s.shape[1]
        self.length[rows] = (self.length[rows] + 1).clamp(max=self.s.shape[1])

    @staticmethod
    def _of(kept: Tensor, rows: Tensor) -> Tensor:
        return kept if len(rows) == len(kept) else kept[rows]  # rows are in order, so as many rows are all rows

    def direction(self, g: Tensor, problems: Tensor) -> Tensor:
        """-H g by the compact form (Byrd, Nocedal & Schnabel, 1994, eq. 3.1), pairs ordered from oldest to newest."""
        history = self.s.shape[1]
        s, y = self._of(self.s, problems), self._of(self.y, problems)
        length, head = self.length[problems], self.head[problems]
        order = (head[:, None] - 1 - torch.arange(history - 1, -1, -1, device=g.device)) % history
        known = torch.arange(history - 1, -1, -1, device=g.device) < length[:, None]
        both = known[:, :, None] & known[:, None, :]
        sy, yy = (self._ordered(self._of(t, problems), order) * both for t in (self.sy, self.yy))
        upper = sy.triu() + torch.diag_embed((~known).to(g.dtype))
        pairs = sy.diagonal(dim1=1, dim2=2)
        newest, square = pairs[:, -1], yy[:, -1, -1]
        gamma = torch.where(length > 0, newest / square.clamp_min(1e-30), torch.ones_like(newest))[:, None]
        sg, yg = (torch.bmm(t, g[:, :, None])[:, :, 0].gather(1, order) * known for t in (s, y))
        inner = torch.linalg.solve_triangular(upper, sg[:, :, None], upper=True)
        middle = torch.diag_embed(pairs) + gamma[:, :, None] * yy
        right = torch.bmm(middle, inner) - gamma[:, :, None] * yg[:, :, None]
        outer = torch.linalg.solve_triangular(upper.transpose(1, 2), right, upper=False)[:, :, 0]
        by_s, by_y = (torch.zeros_like(sg).scatter(1, order, t * known) for t in (outer, -gamma * inner[:, :, 0]))
        moved = torch.bmm(by_s[:, None], s)[:, 0] + torch.bmm(by_y[:, None], y)[:, 0]
        return -(gamma * g + moved)

    @staticmethod
    def _ordered(products: Tensor, order: Tensor) -> Tensor:
        rows = products.gather(1, order[:, :, None].expand_as(products))
        return rows.gather(2, order[:, None, :].expand_as(rows))


def restarted(descent: Descent, again: Descent, rows: Tensor) -> None:
    """Take over the result of restarting some rows where it is lower; its evaluations count."""
    descent.spent[rows] += again.spent
    lower = again.f < descent.f[rows].nan_to_num(torch.inf)
    for name in ("x", "f", "g"):
        getattr(descent, name)[rows[lower]] = getattr(again, name)[lower]
    descent.ended[rows] = again.ended
