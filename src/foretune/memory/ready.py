"""The engine's queue of nodes that are ready: the highest sequence number first, equals as C++'s heap has them."""

from typing import Any

__all__ = ["ReadyQueue"]

Task = tuple[int, Any, Any]
"""A sequence number, a node, its gradients."""


class ReadyQueue:
    """std::priority_queue of libstdc++ (bits/stl_heap.h), which torch's Linux wheels are built with."""

    __slots__ = ("tasks",)

    def __init__(self, first: Task) -> None:
        self.tasks = [first]

    def push(self, task: Task) -> None:
        """push_back, then push_heap."""
        self.tasks.append(task)
        self._rise(len(self.tasks) - 1, task)

    def pop(self) -> Task:
        """pop_heap, then pop_back: the last task's hole sinks to a leaf and the task rises from there."""
        tasks = self.tasks
        last = tasks.pop()
        if not tasks:
            return last
        top, hole, second, length = tasks[0], 0, 0, len(tasks)
        while second < (length - 1) // 2:
            second = 2 * (second + 1)
            if tasks[second][0] < tasks[second - 1][0]:
                second -= 1
            tasks[hole] = tasks[second]
            hole = second
        if length % 2 == 0 and second == (length - 2) // 2:
            second = 2 * (second + 1)
            tasks[hole] = tasks[second - 1]
            hole = second - 1
        self._rise(hole, last)
        return top

    def _rise(self, hole: int, task: Task) -> None:
        tasks, parent = self.tasks, (hole - 1) // 2
        while hole > 0 and tasks[parent][0] < task[0]:
            tasks[hole] = tasks[parent]
            hole, parent = parent, (parent - 1) // 2
        tasks[hole] = task
